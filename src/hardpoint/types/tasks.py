"""What a served model can be asked for."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

GenerationTask: TypeAlias = Literal["generate", "transcription", "realtime"]
PoolingTask: TypeAlias = Literal["embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify"]
FrontendTask: TypeAlias = Literal["render"]
SupportedTask: TypeAlias = Literal[GenerationTask, PoolingTask, FrontendTask]

GENERATION_TASKS: tuple[str, ...] = get_args(GenerationTask)
POOLING_TASKS: tuple[str, ...] = get_args(PoolingTask)
FRONTEND_TASKS: tuple[str, ...] = get_args(FrontendTask)
