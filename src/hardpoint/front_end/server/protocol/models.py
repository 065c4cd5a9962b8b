"""Bodies of /v1/models."""

from __future__ import annotations

from pydantic import Field

from hardpoint.front_end.server.protocol.base import OpenAIBaseModel, now, random_id


class ModelPermission(OpenAIBaseModel):
    """A fixed object older clients look for."""

    id: str = Field(default_factory=lambda: f"modelperm-{random_id()}")
    object: str = "model_permission"
    created: int = Field(default_factory=now)
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(OpenAIBaseModel):
    """One served name."""

    id: str
    object: str = "model"
    created: int = Field(default_factory=now)
    owned_by: str = "vllm"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[ModelPermission] = Field(default_factory=list)


class ModelList(OpenAIBaseModel):
    """Base names first, then adapters."""

    object: str = "list"
    data: list[ModelCard] = Field(default_factory=list)
