"""A request with n > 1: n sequences of their own in the engine, one answer for the caller."""

from __future__ import annotations

from copy import copy

from hardpoint.types.outputs import CompletionOutput
from hardpoint.types.sampling_params import RequestOutputKind, SamplingParams
from hardpoint.types.stats import IterationStats

_MAX_SEED = 2**63 - 1


class ParentRequest:
    """Makes the children's ids and parameters and puts their outputs together.

    request_id       internal id of the whole request
    external_req_id  the caller's id
    child_requests   internal ids of children that have not ended
    """

    def __init__(self, request_id: str, sampling_params: SamplingParams, external_req_id: str | None = None) -> None:
        self.request_id = request_id
        self.external_req_id = external_req_id or request_id
        self.sampling_params = sampling_params
        self.child_requests = {self._child_id(index) for index in range(sampling_params.n)}
        self._finals: dict[int, CompletionOutput] = {}
        self._longest = 0

    @property
    def n(self) -> int:
        """How many outputs were asked for."""
        return self.sampling_params.n

    def get_child_info(self, index: int) -> tuple[str, SamplingParams]:
        """Id and parameters of child `index`; seeded children get seeds of their own."""
        params = copy(self.sampling_params)
        params.n = 1
        if params.seed is not None and index:
            # Kept in the range of seeds, and away from -1, which means "no seed".
            params.seed = (params.seed + index) & _MAX_SEED
        return self._child_id(index), params

    def _child_id(self, index: int) -> str:
        return f"{index}_{self.request_id}"

    def get_outputs(self, child_id: str, output: CompletionOutput) -> tuple[list[CompletionOutput], bool]:
        """What to show now, and whether the whole request is over."""
        if output.finished():
            self.child_requests.discard(child_id)
        finished = not self.child_requests
        if self.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY:
            return [output], finished
        self._finals[output.index] = output
        return [self._finals[index] for index in sorted(self._finals)] if finished else [], finished

    @staticmethod
    def observe_finished_request(parent: ParentRequest | None, stats: IterationStats, tokens: int) -> None:
        """Count a sequence that ended; a parent counts once, with its longest child."""
        if parent is None:
            stats.max_num_generation_tokens_iter.append(tokens)
            stats.n_params_iter.append(1)
            return
        parent._longest = max(parent._longest, tokens)
        if not parent.child_requests:
            stats.max_num_generation_tokens_iter.append(parent._longest)
            stats.n_params_iter.append(parent.n)
