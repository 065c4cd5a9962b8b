"""Parameters of a pooling request."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec

from hardpoint.errors import VLLMValidationError
from hardpoint.types.sampling_params import RequestOutputKind
from hardpoint.types.tasks import POOLING_TASKS

_STEP = ("step_tag_id", "returned_token_ids")
# What each task lets a request say.
_OF_TASK: dict[str, tuple[str, ...]] = {
    "embed": ("dimensions", "use_activation"),
    "token_embed": ("dimensions", "use_activation"),
    "classify": ("use_activation",),
    "token_classify": ("use_activation",),
    "embed&token_classify": ("dimensions", "use_activation"),
}


class LateInteractionParams(msgspec.Struct, omit_defaults=True):
    """Scoring of documents against a query that the engine keeps; refused by this version."""

    mode: str
    query_key: str
    query_uses: int | None = None


class PoolingParams(msgspec.Struct, omit_defaults=True, array_like=True):
    """What to compute from a prompt's hidden states; `task` names the kind of answer.

    use_activation  apply the head's last function; None = as the model's pooling settings say
    dimensions      keep so many dimensions of an embedding
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    @property
    def all_parameters(self) -> list[str]:
        """What a request may say for one task or another."""
        return ["dimensions", "use_activation", *_STEP]

    @property
    def valid_parameters(self) -> dict[str, list[str]]:
        """The same by task, for poolers that are not chosen by steps."""
        return {task: list(names) for task, names in _OF_TASK.items()}

    def clone(self) -> PoolingParams:
        """An independent copy."""
        return deepcopy(self)

    def verify(self, model_config: Any) -> None:
        """Hold a request against a model and fill in the model's pooling settings.

        A plugin's own task is not checked: its processor knows what it asks for.
        Raises VLLMValidationError naming the parameter.
        """
        if self.task is not None and self.task not in POOLING_TASKS:
            raise VLLMValidationError(
                f"the task {self.task!r} is not known; known are {', '.join(POOLING_TASKS)}", parameter="task"
            )
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise VLLMValidationError("pooling has one output: output_kind must be FINAL_ONLY", parameter="output_kind")
        if self.late_interaction_params is not None:
            raise VLLMValidationError(
                "late_interaction_params are not supported by this version", parameter="late_interaction_params"
            )
        if self.task == "plugin":
            return
        settings = model_config.pooler_config
        self._check_names(getattr(settings, "tok_pooling_type", None) == "STEP")
        self._fill(settings)
        self._check_dimensions(model_config)

    def _check_names(self, by_steps: bool) -> None:
        allowed = {*_OF_TASK.get(self.task or "", self.all_parameters), *(_STEP if by_steps else ())}
        for name in self.all_parameters:
            if name not in allowed and getattr(self, name) is not None:
                raise VLLMValidationError(f"{name} means nothing for the task {self.task!r}", parameter=name)

    def _fill(self, settings: Any) -> None:
        if self.use_activation is None:
            self.use_activation = getattr(settings, "use_activation", None)
        if self.dimensions is None and "dimensions" in _OF_TASK.get(self.task or "", ()):
            self.dimensions = getattr(settings, "dimensions", None)
        for name in _STEP if self.task in ("token_embed", "token_classify") else ():
            if getattr(self, name) is None and getattr(settings, "tok_pooling_type", None) == "STEP":
                setattr(self, name, getattr(settings, name, None))

    def _check_dimensions(self, model_config: Any) -> None:
        asked = self.dimensions
        if asked is None:
            return
        if not model_config.is_matryoshka:
            raise VLLMValidationError(
                "the model's embeddings may not be shortened: it does not say that it is a Matryoshka model "
                """(where that is missing in its config: --hf-overrides '{"is_matryoshka": true}')""",
                parameter="dimensions",
                value=asked,
            )
        listed = getattr(model_config.hf_config, "matryoshka_dimensions", None)
        most = model_config.embedding_size
        if (listed and asked not in listed) or not 1 <= asked <= most:
            allowed = f"one of {', '.join(map(str, listed))}" if listed else f"in [1, {most}]"
            raise VLLMValidationError(f"dimensions must be {allowed}, got {asked}", parameter="dimensions", value=asked)
