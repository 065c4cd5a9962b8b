"""What a request may ask in vLLM and we do not have: refused by name, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.types.messages import EngineCoreRequest

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig


def why_refused(request: EngineCoreRequest, vllm_config: VllmConfig, tasks: tuple[str, ...]) -> str | None:
    """Why a request cannot be served by this engine, in words for the client; None when it can.

    The front end says the same earlier, with the parameter's name; this is for requests that come another way.
    """
    for asked, what in (
        (request.prompt_embeds is not None or request.prompt_is_token_ids is not None, "prompt embeddings"),
        (request.resumable, "streamed input"),
        (request.kv_hints is not None, "KV cache hints"),
        (bool(_extra(request, "kv_transfer_params")), "KV transfer parameters"),
        (bool(_extra(request, "ec_transfer_params")), "encoder-cache transfer parameters"),
    ):
        if asked:
            return f"{what} are not supported by this version"
    if request.prompt_token_ids is None:
        return "the request has no prompt"
    if request.mm_features and not getattr(vllm_config.model_config, "is_multimodal_model", False):
        return "media in prompts are not supported by this model, which reads text"
    if request.pooling_params is not None:
        task = request.pooling_params.task
        return None if task in tasks else f"the model does not support the task {task!r}"
    if request.sampling_params is None:
        return "the request has no sampling parameters"
    if "generate" not in tasks:
        return f"the model does not generate text; it supports {', '.join(tasks) or 'no task'}"
    return None


def _extra(request: EngineCoreRequest, name: str) -> object:
    extra = request.sampling_params.extra_args if request.sampling_params else None
    return (extra or {}).get(name)
