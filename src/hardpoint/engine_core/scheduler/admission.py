"""Which requests could never run, so that nobody waits for them."""

from __future__ import annotations

from hardpoint.engine_core.request import Request


def why_impossible(request: Request, model_max_len: int, cache_max_len: int, unchunked: int | None) -> str | None:
    """Why a request could never run, in words for the client; None when it could.

    model_max_len  tokens of the longest sequence by the configuration
    cache_max_len  the same, by what the whole KV cache can hold
    unchunked      tokens of the largest step where a prompt must fit into one; None where it may be split
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        return "The prompt has no token."
    # A generated token needs a place too.
    room = 0 if request.pooling_params is not None else 1
    if num_prompt + room > model_max_len:
        return f"The prompt has {num_prompt} tokens, which leaves no room below the context length of {model_max_len}."
    if num_prompt + room > cache_max_len:
        return (
            f"The prompt has {num_prompt} tokens, but the whole KV cache holds only {cache_max_len}. "
            "Give it more memory (--kv-cache-memory-bytes, --gpu-memory-utilization) or shorten the prompt."
        )
    if unchunked is not None and num_prompt > unchunked:
        return (
            f"The prompt has {num_prompt} tokens, but a step takes at most {unchunked} and chunked prefill is off. "
            "Raise --max-num-batched-tokens or enable chunked prefill."
        )
    return None
