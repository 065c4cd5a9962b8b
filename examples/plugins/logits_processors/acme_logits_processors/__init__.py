"""A logits processor (V2): state per request slot, in every worker. VLLM_PLUGINS does not govern this group."""

from typing import Any

import torch

from hardpoint.contracts.logits_processor import LogitsContext, LogitsProcessorV2, LogitsProcRequestState
from hardpoint.types.sampling_params import SamplingParams


class AcmeOnly(LogitsProcessorV2):
    """`"vllm_xargs": {"acme_only": [5, 7]}`: nothing but these tokens is written."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self.allowed: list[list[int] | None] = [None] * req_states.max_num_reqs

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """In the front end, for every request: a ValueError is answered with 400."""
        tokens = _tokens(sampling_params)
        if tokens is not None and not (isinstance(tokens, list) and tokens and all(type(t) is int for t in tokens)):
            raise ValueError("acme_only must be a list of token ids")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A request got the slot: overwrite what it held, say whether the request uses us."""
        self.allowed[req_idx] = _tokens(sampling_params)
        return self.allowed[req_idx] is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Change the rows [rows, vocabulary] of our requests; the others are to be left alone."""
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            allowed = self.allowed[slot]
            if allowed is not None:
                kept = logits[row, allowed].clone()
                logits[row] = float("-inf")
                logits[row, allowed] = kept
        return logits


def _tokens(params: SamplingParams) -> Any:
    return (params.extra_args or {}).get("acme_only")
