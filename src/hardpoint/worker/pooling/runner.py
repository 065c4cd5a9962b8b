"""The pooling half of a worker's step: what the model is given beside ids, and results from its hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hardpoint.contracts.model import accepts_keyword
from hardpoint.errors import PluginError
from hardpoint.log import init_logger
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.schedule import ModelRunnerOutput
from hardpoint.types.tasks import POOLING_TASKS
from hardpoint.worker.batch import RequestState, RequestTable
from hardpoint.worker.layers.encoder_attention import EncoderBatch, EncoderOnlyAttention
from hardpoint.worker.pooling.metadata import PoolingMetadata, PoolingStates
from hardpoint.worker.step_inputs import StepInputs

logger = init_logger(__name__)
_TYPE_IDS = "token_type_ids"
# Where the second of two texts begins, in a request's `extra_kwargs`.
SECOND_TEXT = "compressed_token_type_ids"


@dataclass
class _Complete:
    """A request whose prompt is computed, with its rows [rows, hidden]."""

    state: RequestState
    rows: Tensor


class PoolingRunner:
    """Pools for one loaded model."""

    def __init__(self, model: nn.Module) -> None:
        pooler = getattr(model, "pooler", None)
        if not callable(pooler) or not hasattr(pooler, "get_supported_tasks"):
            raise PluginError(
                f"{type(model).__name__} is a pooling model without a pooler",
                code="model-pooler",
                origin=type(model).__module__,
                fix="set self.pooler to a Pooler in its constructor",
            )
        self._pooler: Any = pooler
        self._takes_types = accepts_keyword(model.forward, _TYPE_IDS) and not _takes_anything(model)
        self._encoder_layers = [m.layer_name for m in model.modules() if isinstance(m, EncoderOnlyAttention)]
        # Rows of prompts that are computed over several steps, by request: position of the first, and all of them.
        self._parts: dict[str, tuple[int, list[Tensor]]] = {}

    def tasks(self) -> tuple[str, ...]:
        """What the pooler answers, in the order of `PoolingTask`."""
        supported = set(self._pooler.get_supported_tasks())
        return tuple(task for task in POOLING_TASKS if task in supported)

    # Before the model runs.

    def model_arguments(self, inputs: StepInputs, device: torch.device) -> dict[str, Tensor]:
        """What the model's forward is given beside ids and positions: segment ids, if it takes them and there are."""
        if not self._takes_types:
            return {}
        starts = [_second_text(state.pooling_params) for state in inputs.states]
        if all(start is None for start in starts):
            return {}
        first = np.array([2**31 if start is None else start for start in starts], np.int64)
        types = inputs.positions >= np.repeat(first, inputs.num_tokens)
        return {_TYPE_IDS: torch.from_numpy(types.astype(np.int64)).to(device)}

    def attention_metadata(self, inputs: StepInputs) -> dict[str, EncoderBatch]:
        """Layer name -> the step, for layers that keep nothing."""
        return dict.fromkeys(self._encoder_layers, EncoderBatch(inputs.starts.tolist())) if self._encoder_layers else {}

    # After it has run.

    def pool(self, inputs: StepInputs, hidden: Tensor, table: RequestTable) -> ModelRunnerOutput:
        """The results of the requests whose prompts end in this step.

        hidden  [tokens, hidden]; a prompt's rows of earlier steps were kept
        """
        complete = self._collect(inputs, hidden, table)
        errors: dict[str, str] = {}
        results = self._results(complete, errors)
        ids = [state.req_id for state in inputs.states]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
            sampled_token_ids=[[] for _ in ids],
            pooler_output=[results.get(req_id) for req_id in ids],
            request_errors=errors,
        )

    def _collect(self, inputs: StepInputs, hidden: Tensor, table: RequestTable) -> list[_Complete]:
        for gone in [req_id for req_id in self._parts if req_id not in table.states]:
            del self._parts[gone]
        complete = []
        bounds = inputs.starts.tolist()
        for index, state in enumerate(inputs.states):
            rows = hidden[bounds[index] : bounds[index + 1]]
            computed = int(inputs.num_computed[index])
            first, parts = self._parts.pop(state.req_id, (computed, []))
            if first + sum(map(len, parts)) != computed:
                # It was preempted, and begins anew.
                first, parts = computed, []
            if not inputs.completes[index]:
                self._parts[state.req_id] = first, [*parts, rows.clone()]
                continue
            complete.append(_Complete(state, torch.cat([*parts, rows]) if parts else rows))
        return complete

    def _results(self, complete: Sequence[_Complete], errors: dict[str, str]) -> dict[str, np.ndarray]:
        if not complete:
            return {}
        try:
            outputs = self._call(complete)
        except Exception as error:
            if len(complete) == 1:
                errors[complete[0].state.req_id] = f"the pooler failed: {type(error).__name__}: {error}"
                logger.exception("the pooler failed for request %s", complete[0].state.req_id)
                return {}
            # Which of them is to blame shows when each is tried alone.
            found: dict[str, np.ndarray] = {}
            for one in complete:
                found.update(self._results([one], errors))
            return found
        results = {}
        for one, output in zip(complete, outputs, strict=True):
            req_id = one.state.req_id
            if output is None:
                errors[req_id] = "the pooler has no result for this request"
                continue
            array = output.detach().float().cpu().numpy()
            if not np.isfinite(array).all():
                errors[req_id] = "the model computed numbers that are not finite"
                continue
            results[req_id] = array
        return results

    def _call(self, complete: Sequence[_Complete]) -> list[Tensor | None]:
        hidden = complete[0].rows if len(complete) == 1 else torch.cat([one.rows for one in complete])
        metadata = self._metadata(complete, hidden.device)
        outputs = self._pooler(hidden, metadata)
        listed = list(outputs)
        if len(listed) != len(complete):
            raise ValueError(f"{len(listed)} results for {len(complete)} requests")
        return listed

    def _metadata(self, complete: Sequence[_Complete], device: torch.device) -> PoolingMetadata:
        params = [_params_of(one.state) for one in complete]
        for one in params:
            if one.task in self._pooler.get_supported_tasks():
                self._pooler.get_pooling_updates(one.task).apply(one)
        prompts = [one.state.prompt for one in complete]
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        ids = _padded(prompts) if any(one.requires_token_ids for one in params) else None
        metadata = PoolingMetadata(
            lengths,
            None if ids is None else ids.to(device),
            params,
            [PoolingStates() for _ in complete],
            prompt_token_ids_cpu=ids,
        )
        metadata.build_pooling_cursor([len(one.rows) for one in complete], device=device)
        return metadata


def _params_of(state: RequestState) -> PoolingParams:
    return state.pooling_params or PoolingParams()


def _padded(prompts: Sequence[list[int]]) -> Tensor:
    """[requests, longest] with zeros behind the shorter ones."""
    ids = torch.zeros((len(prompts), max(map(len, prompts))), dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return ids


def _second_text(params: PoolingParams | None) -> int | None:
    start = ((params.extra_kwargs if params is not None else None) or {}).get(SECOND_TEXT)
    return start if isinstance(start, int) else None


def _takes_anything(model: nn.Module) -> bool:
    """Whether the forward only takes segment ids because it takes any keyword."""
    code = getattr(type(model).forward, "__code__", None)
    return code is None or _TYPE_IDS not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
