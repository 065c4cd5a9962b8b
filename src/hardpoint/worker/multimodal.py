"""Media in the worker: items are encoded once, kept as long as the scheduler says, and merged into the prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardpoint.contracts.model import SupportsMultiModal
from hardpoint.extensions.faults import in_words
from hardpoint.log import init_logger
from hardpoint.types.multimodal import MultiModalFeatureSpec
from hardpoint.types.schedule import SchedulerOutput
from hardpoint.worker.batch import RequestState
from hardpoint.worker.distributed.parallel_state import get_pp_group
from hardpoint.worker.step_inputs import StepInputs

logger = init_logger(__name__)


class MediaEncoder:
    """The encoder side of a multimodal model on one device.

    outputs    identifier of an item -> its embeddings [embeddings, hidden]
    wants_ids  the model looks at token ids even where it is given their embeddings
    """

    def __init__(self, model: Any, model_config: Any, device: torch.device) -> None:
        self._model = model
        self._width = model_config.get_inputs_embeds_size()
        self.wants_ids = bool(getattr(model, "requires_raw_input_tokens", False))
        self._device = device
        self._features: dict[str, list[MultiModalFeatureSpec]] = {}
        self.outputs: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Drop what is kept of items."""
        self.outputs.clear()

    def follow(self, plan: SchedulerOutput, states: dict[str, RequestState]) -> None:
        """Take in a step's changes and encode the items it asks for; an item that fails ends its request alone."""
        for req_id in plan.finished_req_ids:
            self._features.pop(req_id, None)
        for identifier in plan.free_encoder_mm_hashes:
            self.outputs.pop(identifier, None)
        for data in plan.scheduled_new_reqs:
            if data.mm_features:
                self._features[data.req_id] = data.mm_features
        if not get_pp_group().is_first_rank:
            return
        for req_id, numbers in plan.scheduled_encoder_inputs.items():
            for number in numbers:
                self._encode(self._features[req_id][number], states[req_id])

    def _encode(self, feature: MultiModalFeatureSpec, state: RequestState) -> None:
        # One at a time: what an item becomes does not depend on who else is in the step.
        try:
            self.outputs[feature.identifier] = self._output(feature)
        except Exception as error:
            logger.warning("request %s: its %s cannot be encoded", state.req_id, feature.modality, exc_info=error)
            state.fault = state.fault or f"the {feature.modality} cannot be encoded: {in_words(error)}"

    def _output(self, feature: MultiModalFeatureSpec) -> Tensor:
        if feature.data is None:
            raise ValueError("the item came without data")
        given = {name: self._tensor(value) for name, value in feature.data.as_batch().items()}
        made = _embedding_method(self._model)(**given)
        if made is None or len(made) != 1:
            raise ValueError(f"the model made {0 if made is None else len(made)} embeddings of one item")
        output, rows = made[0], feature.mm_position.get_num_embeds()
        if output.dim() != 2 or len(output) != rows:
            raise ValueError(f"its embeddings have the shape {tuple(output.shape)}, and the prompt has {rows} places")
        return output

    def _tensor(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value if value.flags.writeable else value.copy()).to(self._device)
        if isinstance(value, list):
            return [self._tensor(part) for part in value]
        return value

    def embeds(self, inputs: StepInputs, input_ids: Tensor) -> Tensor | None:
        """The embeddings [tokens, hidden] of a step some of whose tokens stand for media; None for one without."""
        if not self._features or not get_pp_group().is_first_rank:
            return None
        places = np.zeros(inputs.total_tokens, bool)
        parts: list[Tensor] = []
        for index, state in enumerate(inputs.states):
            for feature in self._features.get(state.req_id, ()):
                self._gather(feature, state, inputs, index, places, parts)
        if not parts:
            return None
        mask = torch.from_numpy(places).to(self._device)
        return self._model.embed_input_ids(input_ids, parts, is_multimodal=mask)

    def _gather(
        self,
        feature: MultiModalFeatureSpec,
        state: RequestState,
        inputs: StepInputs,
        index: int,
        places: np.ndarray,
        parts: list[Tensor],
    ) -> None:
        """Add what of an item is among a request's tokens of this step."""
        position, computed = feature.mm_position, int(inputs.num_computed[index])
        begin = max(position.offset, computed)
        end = min(position.end, computed + int(inputs.num_tokens[index]))
        if begin >= end:
            return
        first, last = position.get_embeds_indices_in_range(begin - position.offset, end - position.offset)
        output = self.outputs.get(feature.identifier)
        if output is None:
            state.fault = state.fault or f"the {feature.modality} was not encoded"
            # Its tokens are computed all the same, and nobody sees the result.
            output = torch.zeros(position.get_num_embeds(), self._width, device=self._device)
        row = int(inputs.starts[index]) + begin - computed
        inside = slice(begin - position.offset, end - position.offset)
        places[row : row + end - begin] = True if position.is_embed is None else position.is_embed[inside]
        if last > first:
            parts.append(output[first:last])


def _embedding_method(model: Any) -> Any:
    """`embed_multimodal`, or what it was called before."""
    own = getattr(type(model), "embed_multimodal", None)
    older = getattr(model, "get_multimodal_embeddings", None)
    if own in (None, SupportsMultiModal.embed_multimodal) and older is not None:
        return older
    return model.embed_multimodal
