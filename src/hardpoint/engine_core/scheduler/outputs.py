"""What one step has for the front ends."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from hardpoint.engine_core.request import Request
from hardpoint.types.logprobs import LogprobsLists
from hardpoint.types.messages import EngineCoreOutput, EngineCoreOutputs
from hardpoint.types.schedule import ModelRunnerOutput


class StepOutputs:
    """Reads a `ModelRunnerOutput` by request and collects the outputs per front end."""

    def __init__(self, result: ModelRunnerOutput) -> None:
        self._result = result
        self._by_client: dict[int, list[EngineCoreOutput]] = {}
        # Rows of `logprobs` before each request's own; they go by sampled tokens.
        self._first_rows: list[int] | None = None
        if result.logprobs is not None:
            self._first_rows = [0, *accumulate(len(ids) for ids in result.sampled_token_ids)]

    def error_of(self, request_id: str) -> str | None:
        """Why this request failed in the step, or None."""
        return self._result.request_errors.get(request_id)

    def tokens_of(self, request_id: str) -> list[int]:
        """The tokens sampled for a request; an empty list for none."""
        row = self._result.req_id_to_index.get(request_id)
        sampled = self._result.sampled_token_ids
        return sampled[row] if row is not None and sampled else []

    def pooled_of(self, request_id: str) -> Any:
        """A pooling request's answer, or None while it has none."""
        row = self._result.req_id_to_index.get(request_id)
        pooled = self._result.pooler_output
        return pooled[row] if row is not None and pooled else None

    def first_logprob_row(self, request_id: str) -> int | None:
        """Where a request's log-probabilities begin, or None."""
        row = self._result.req_id_to_index.get(request_id)
        return None if self._first_rows is None or row is None else self._first_rows[row]

    def add(
        self,
        request: Request,
        new_token_ids: list[int],
        first_row: int | None = None,
        with_prompt_logprobs: bool = False,
    ) -> None:
        """Collect a request's output, unless the step had nothing for it.

        with_prompt_logprobs  False once tokens were generated: a recomputation makes them again
        """
        result, request_id = self._result, request.request_id
        prompt_logprobs = result.prompt_logprobs_dict.get(request_id) if with_prompt_logprobs else None
        pooled = self.pooled_of(request_id) if request.pooling_params is not None else None
        reason = request.get_finished_reason()
        if result.num_nans_in_logits:
            request.num_nans_in_logits = result.num_nans_in_logits.get(request_id, 0)
        if not (new_token_ids or prompt_logprobs is not None or pooled is not None or reason is not None):
            return
        output = EngineCoreOutput(
            request_id=request_id,
            new_token_ids=new_token_ids,
            new_logprobs=self._logprobs(request, first_row, len(new_token_ids)),
            new_prompt_logprobs_tensors=prompt_logprobs,
            pooling_output=pooled,
            finish_reason=reason,
            stop_reason=request.stop_reason,
            events=request.take_events(),
            trace_headers=request.trace_headers,
            prefill_stats=request.take_prefill_stats(),
            num_nans_in_logits=request.num_nans_in_logits,
            error=request.error,
            refused_parameter=request.refused_parameter,
        )
        self._by_client.setdefault(request.client_index, []).append(output)

    def _logprobs(self, request: Request, first_row: int | None, num_tokens: int) -> LogprobsLists | None:
        params, everything = request.sampling_params, self._result.logprobs
        if params is None or everything is None or first_row is None or not num_tokens:
            return None
        wanted = params.num_logprobs
        if wanted is None:
            return None
        rows = everything.slice_rows(first_row, first_row + num_tokens)
        if wanted < 0:
            return rows
        # The batch has as many columns as its most demanding request.
        columns = wanted + 1
        return LogprobsLists(rows.logprob_token_ids[:, :columns], rows.logprobs[:, :columns], rows.sampled_token_ranks)

    def by_client(self) -> dict[int, EngineCoreOutputs]:
        """All outputs, per front end."""
        return {client: EngineCoreOutputs(outputs=outputs) for client, outputs in self._by_client.items()}
