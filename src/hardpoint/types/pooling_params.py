"""Parameters of a pooling request."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec

from hardpoint.types.sampling_params import RequestOutputKind


class PoolingParams(msgspec.Struct, omit_defaults=True, array_like=True):
    """What to compute from a prompt's hidden states; `task` names the kind of answer."""

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

    def clone(self) -> PoolingParams:
        """An independent copy."""
        return deepcopy(self)
