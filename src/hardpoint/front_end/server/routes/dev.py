"""Developer routes, present with VLLM_SERVER_DEV_MODE=1. They change or show the inside of the server."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.errors import not_implemented
from hardpoint.front_end.server.routes.common import context_of
from hardpoint.front_end.server.server_facts import server_facts

router = APIRouter()


def _engine(request: Request) -> Any:
    return request.app.state.engine_client


class CollectiveRpcBody(BaseModel):
    """A worker method to call."""

    method: str = Field(min_length=1)
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: float | None = Field(default=None, gt=0)


class AbortBody(BaseModel):
    """Requests to end; none named = all."""

    request_ids: list[str] = Field(default_factory=list)


@router.get("/server_info")
async def show_server_info(
    raw_request: Request, config_format: Annotated[Literal["text", "json"], Query()] = "text"
) -> dict[str, Any]:
    """Configuration, environment variables and system, secrets left out."""
    return server_facts(raw_request.app.state.vllm_config, config_format)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    raw_request: Request, reset_running_requests: bool = False, reset_external: bool = False
) -> dict[str, bool]:
    """Forget cached prefixes."""
    return {"success": bool(await _engine(raw_request).reset_prefix_cache(reset_running_requests, reset_external))}


@router.post("/reset_mm_cache")
async def reset_mm_cache(raw_request: Request) -> None:
    """Drop cached media."""
    await _engine(raw_request).reset_mm_cache()


@router.post("/reset_encoder_cache")
async def reset_encoder_cache(raw_request: Request) -> None:
    """Drop cached encoder outputs."""
    await _engine(raw_request).reset_encoder_cache()


@router.post("/collective_rpc")
async def collective_rpc(body: CollectiveRpcBody, raw_request: Request) -> dict[str, list[Any]]:
    """Call a method of every worker; results that are not JSON come back as text."""
    results = await _engine(raw_request).collective_rpc(
        body.method, timeout=body.timeout, args=tuple(body.args), kwargs=body.kwargs
    )
    return {"results": [_plain(result) for result in results or []]}


def _plain(result: Any) -> Any:
    if result is None or isinstance(result, dict | list):
        try:
            json.dumps(result)
        except (TypeError, ValueError):
            return str(result)
        return result
    return str(result)


@router.post("/sleep")
async def sleep(
    raw_request: Request,
    level: Annotated[int, Query(ge=0, le=2)] = 1,
    mode: Literal["abort", "wait", "keep"] = "abort",
) -> dict[str, Any]:
    """Give memory back."""
    await _engine(raw_request).sleep(level, mode)
    return {"status": "sleeping", "level": level}


@router.post("/wake_up")
async def wake_up(raw_request: Request, tags: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
    """Take it again."""
    awake = await _engine(raw_request).wake_up(tags)
    return {"status": "awake" if awake else "sleeping", "tags": tags or []}


@router.get("/is_sleeping")
async def is_sleeping(raw_request: Request) -> dict[str, bool]:
    """Whether memory was given back."""
    return {"is_sleeping": await _engine(raw_request).is_sleeping()}


@router.post("/release_kv_cache_memory")
async def release_kv_cache_memory(raw_request: Request) -> dict[str, str]:
    """Free the KV cache while asleep."""
    await _engine(raw_request).release_kv_cache_memory()
    return {"status": "kv_cache_released"}


@router.post("/pause")
async def pause(
    raw_request: Request, mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
) -> dict[str, str]:
    """Stop generating."""
    await _engine(raw_request).pause_generation(mode=mode, clear_cache=clear_cache)
    return {"status": "paused"}


@router.post("/resume")
async def resume(raw_request: Request) -> dict[str, str]:
    """Generate again."""
    await _engine(raw_request).resume_generation()
    return {"status": "resumed"}


@router.get("/is_paused")
async def is_paused(raw_request: Request) -> dict[str, bool]:
    """Whether generation is stopped."""
    return {"is_paused": await _engine(raw_request).is_paused()}


@router.post("/abort_requests")
async def abort_requests(raw_request: Request, body: AbortBody | None = None) -> dict[str, Any]:
    """End requests by id; without ids, all of them."""
    ids = context_of(raw_request).running.ids(body.request_ids if body is not None else [])
    if ids:
        await _engine(raw_request).abort(ids)
    return {"status": "aborted", "aborted": len(ids)}


@router.post("/update_weight_version")
async def update_weight_version(raw_request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Label the weights."""
    version = body.get("new_version")
    if not isinstance(version, str) or not version:
        raise VLLMValidationError("new_version must be a text", parameter="new_version")
    await _engine(raw_request).update_weight_version(version)
    return {"success": True, "new_version": version}


@router.get("/weight_info")
async def weight_info(raw_request: Request) -> dict[str, str]:
    """The label of the weights."""
    return {"weight_version": await _engine(raw_request).get_weight_version()}


@router.get("/get_world_size")
async def get_world_size(raw_request: Request, include_dp: bool = True) -> dict[str, int]:
    """How many workers there are."""
    parallel = raw_request.app.state.vllm_config.parallel_config
    size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return {"world_size": size * (parallel.data_parallel_size if include_dp else 1)}


async def _not_here(raw_request: Request) -> None:
    """Part of vLLM's developer routes that this server does not have."""
    raise not_implemented(f"{raw_request.url.path} is not available in this server")


for _path in (
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/weight_checker",
):
    router.add_api_route(_path, _not_here, methods=["POST"])
