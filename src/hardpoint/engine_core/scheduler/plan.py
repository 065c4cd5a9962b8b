"""The draft of one step, and what is sent to the workers from it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from hardpoint.engine_core.kv_cache.manager import KVCacheBlocks
from hardpoint.engine_core.request import Request
from hardpoint.types.schedule import CachedRequestData, NewRequestData


class StepPlan:
    """Requests of the step being planned, in three kinds, with their tokens and new blocks.

    budget  tokens that may still be planned
    """

    __slots__ = ("blocks", "budget", "new", "num_tokens", "preempted", "resumed", "running")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.new: list[Request] = []
        self.resumed: list[Request] = []
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.num_tokens: dict[str, int] = {}
        self.blocks: dict[str, KVCacheBlocks] = {}

    def add(self, kind: list[Request], request: Request, num_tokens: int, blocks: KVCacheBlocks) -> None:
        """Plan `num_tokens` of a request; `kind` is one of this plan's lists."""
        kind.append(request)
        self.num_tokens[request.request_id] = num_tokens
        self.blocks[request.request_id] = blocks
        self.budget -= num_tokens

    def drop_preempted(self, request: Request) -> None:
        """Note a preemption; a request that was planned already gives its tokens back."""
        self.preempted.append(request)
        num_tokens = self.num_tokens.pop(request.request_id, None)
        if num_tokens is not None:
            self.budget += num_tokens
            del self.blocks[request.request_id]
            # Victims are running requests: they cannot be in the other two lists.
            self.running.remove(request)

    def new_request_data(self) -> list[NewRequestData]:
        """What the workers need of requests they have not seen."""
        return [
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                mm_features=request.mm_features,
                sampling_params=request.sampling_params,
                pooling_params=request.pooling_params,
                block_ids=self.blocks[request.request_id].get_block_ids(),
                num_computed_tokens=request.num_computed_tokens,
                lora_request=request.lora_request,
            )
            for request in self.new
        ]

    def cached_request_data(self, last_step: AbstractSet[str], with_tokens: bool = False) -> CachedRequestData:
        """Deltas for the others; `last_step` holds the ids that the step before computed.

        with_tokens  tell their newest tokens, which not all workers have sampled
        """
        requests = self.running + self.resumed
        blocks = self.blocks
        resumed = {request.request_id for request in self.resumed}
        ids = [request.request_id for request in requests]
        # Preempted and resumed between two steps: in the last one, and yet to be described anew.
        known = last_step - resumed
        return CachedRequestData(
            req_ids=ids,
            resumed_req_ids=resumed,
            new_token_ids=[request.output_token_ids[-1:] for request in requests] if with_tokens else [],
            all_token_ids={r.request_id: r.all_token_ids.copy() for r in requests if r.request_id not in known},
            new_block_ids=[None if blocks[i].is_empty() else blocks[i].get_block_ids() for i in ids],
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            # What the workers will have sampled by then: they take the steps in order.
            num_output_tokens=[request.num_output_tokens + request.num_output_placeholders for request in requests],
        )
