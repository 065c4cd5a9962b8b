"""The HTTP application: routes, endpoint plugins, error handlers, middleware, in that order."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import State
from starlette.middleware.cors import CORSMiddleware

from hardpoint import __version__
from hardpoint.contracts.engine_client import EngineClient
from hardpoint.env import envs
from hardpoint.front_end.observability.http_metrics import HttpMetrics
from hardpoint.front_end.server import endpoints
from hardpoint.front_end.server.asgi import BodyLimit, FaultGuard, LoadTracker, RequestIdHeader, RootPath
from hardpoint.front_end.server.auth import ApiKeyGuard, OpenRoutes
from hardpoint.front_end.server.errors import install_error_handlers
from hardpoint.front_end.server.middleware import add_user_middleware
from hardpoint.front_end.server.route_table import flatten_routes
from hardpoint.front_end.server.routes import (
    chat,
    completions,
    dev,
    health,
    impossible,
    lora,
    messages,
    metrics,
    models,
    page,
    plugins,
    pooling,
    responses,
    tokenize,
)
from hardpoint.front_end.server.serving.chat import ChatService
from hardpoint.front_end.server.serving.completions import CompletionService
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.serving.messages import MessagesService
from hardpoint.front_end.server.serving.pooling import PoolingService
from hardpoint.front_end.server.serving.responses import ResponsesService
from hardpoint.front_end.server.serving.tokenize import TokenizeService
from hardpoint.front_end.server.settings import ServerSettings
from hardpoint.log import init_logger
from hardpoint.types.tasks import POOLING_TASKS

logger = init_logger(__name__)

DEFAULT_TASKS = ("generate",)
# What needs no key: these functions of ours, wherever they stand. A plugin's route never does.
_OPEN_ENDPOINTS = (health.health, health.ping, metrics.metrics, page.page)
_LOAD_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    *pooling.PATHS,
)


def build_app(args: Namespace, supported_tasks: Sequence[str] | None = None) -> FastAPI:
    """Make the application for `serve`'s flags.

    supported_tasks  what the model can do; None = text generation

    `init_app_state` must run before it takes requests. Raises ConfigError for flags that cannot
    work, and what an endpoint plugin's `attach_router` raises.
    """
    settings = ServerSettings.from_args(args)
    tasks = tuple(supported_tasks) if supported_tasks is not None else DEFAULT_TASKS
    docs: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None}
    app = FastAPI(
        title="Hardpoint",
        version=__version__,
        **(docs if settings.disable_fastapi_docs else {}),
    )
    app.state.args = args
    app.state.settings = settings
    app.state.engine_client = None
    app.state.server_load_metrics = 0
    app.state.enable_server_load_tracking = settings.enable_server_load_tracking
    _include_routes(app, settings, tasks)
    endpoints.attach_endpoint_plugins(app, tasks)
    # Behind what plugins bring, which may be just what the model cannot do.
    app.include_router(impossible.router_for(tasks, [getattr(route, "path", "") for route in app.routes]))
    flatten_routes(app)
    install_error_handlers(app, settings.log_error_stack)
    _wrap(app, settings)
    return app


def _include_routes(app: FastAPI, settings: ServerSettings, tasks: tuple[str, ...]) -> None:
    routers = [page.router, health.router, metrics.router, models.router, tokenize.router, plugins.router]
    if "generate" in tasks:
        routers += [completions.router, chat.router, messages.router, responses.router]
    if set(tasks) & set(POOLING_TASKS):
        routers.append(pooling.router_for(tasks))
    if settings.enable_tokenizer_info_endpoint:
        routers.append(tokenize.info_router)
    if envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        routers.append(lora.router)
    if envs.VLLM_SERVER_DEV_MODE:
        logger.warning("VLLM_SERVER_DEV_MODE is set: developer routes are open to whoever may use this server")
        routers.append(dev.router)
    for router in routers:
        app.include_router(router)
    flatten_routes(app)


def _wrap(app: FastAPI, settings: ServerSettings) -> None:
    """Add middleware, innermost first.

    A request passes: root path, metrics, request id, fault guard, body limit, user middleware in the order of
    the command line, CORS, load count, API key, routes.
    """
    keys = settings.accepted_keys()
    if keys:
        app.add_middleware(ApiKeyGuard, keys=keys, open_routes=open_routes(app))
    if settings.enable_server_load_tracking:
        app.add_middleware(LoadTracker, paths=_LOAD_PATHS, add=_load_counter(app.state))
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_credentials=settings.allow_credentials,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
        )
    add_user_middleware(app, settings.middleware)
    app.add_middleware(BodyLimit, max_bytes=envs.HARDPOINT_MAX_BODY_MB << 20)
    app.add_middleware(FaultGuard, log_error_stack=settings.log_error_stack)
    if settings.enable_request_id_headers:
        app.add_middleware(RequestIdHeader)
    app.add_middleware(HttpMetrics)
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)


def _load_counter(state: State) -> Any:
    def add(change: int) -> None:
        state.server_load_metrics += change

    return add


def open_routes(app: FastAPI) -> OpenRoutes:
    """The routes that need no key: ours by identity, so that one a plugin replaced does."""
    pairs, trees = [], []
    for route in app.routes:
        if not isinstance(route, APIRoute) or route.endpoint not in _OPEN_ENDPOINTS:
            continue
        if "{" in route.path:
            trees.append(route.path.partition("/{")[0])
        else:
            pairs += [(method, route.path) for method in route.methods or ()]
    return OpenRoutes(pairs, trees)


async def init_app_state(engine_client: EngineClient, state: State, args: Namespace) -> None:
    """Connect an application's state to a running engine, then let endpoint plugins add theirs.

    The attribute names are vLLM's: endpoint plugins and middleware read them from `app.state`.
    """
    settings: ServerSettings = getattr(state, "settings", None) or ServerSettings.from_args(args)
    context = ServerContext.build(engine_client, settings)
    await context.adapters.load_modules(settings.adapter_modules())
    state.engine_client = engine_client
    state.vllm_config = engine_client.vllm_config
    state.args = args
    state.log_stats = not settings.disable_log_stats
    state.context = context
    state.openai_serving_completion = CompletionService(context)
    state.openai_serving_chat = ChatService(context)
    servers = getattr(args, "api_server_count", None) or 1
    state.openai_serving_responses = ResponsesService(context, state.openai_serving_chat, servers)
    state.anthropic_serving_messages = MessagesService(context, state.openai_serving_chat)
    if engine_client.model_config.runner_type == "pooling":
        state.serving_pooling = PoolingService(context, await engine_client.get_supported_tasks())
    state.openai_serving_tokenization = TokenizeService(context)
    await endpoints.init_endpoint_plugins_state(engine_client, state, args)
