"""Endpoint plugins: their routes join ours in two phases, and take the place of those they repeat."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import State
from starlette.types import ASGIApp, Receive, Scope, Send

from hardpoint.contracts.engine_client import EngineClient
from hardpoint.errors import HardpointError, PluginError
from hardpoint.extensions.boot import load_endpoint_plugins
from hardpoint.extensions.faults import in_words, note_fault
from hardpoint.extensions.ledger import Origin, attributing, ledger
from hardpoint.extensions.loading import owner_of
from hardpoint.front_end.server.errors import failure_of
from hardpoint.front_end.server.route_table import flatten_routes
from hardpoint.log import init_logger

logger = init_logger(__name__)


def attach_endpoint_plugins(app: FastAPI, supported_tasks: Sequence[str] | None) -> list[Any]:
    """Phase A: load the plugins, let each add its routes, settle who serves what.

    Raises what a plugin's `attach_router` raises: the server does not start.
    """
    plugins = load_endpoint_plugins(supported_tasks)
    own = {id(route) for route in app.routes}
    owners: dict[int, Origin] = {}
    for plugin in plugins:
        known = {id(route) for route in app.routes}
        origin = _origin(plugin)
        with attributing(origin):
            plugin.attach_router(app)
        flatten_routes(app)
        for route in app.routes:
            if id(route) not in known:
                owners[id(route)] = origin
                _watch(route, origin)
    app.state.endpoint_plugins = plugins
    if plugins:
        app.router.routes[:] = settle_routes(app.routes, own, owners)
        app.openapi_schema = None
    return plugins


async def init_endpoint_plugins_state(engine_client: EngineClient | None, state: State, args: Namespace) -> None:
    """Phase B: let each plugin keep what its routes need, one after the other.

    Raises what a plugin's `init_state` raises: the server does not start.
    """
    for plugin in getattr(state, "endpoint_plugins", []):
        with attributing(_origin(plugin)):
            await plugin.init_state(engine_client, state, args)


class _Watched:
    """A plugin's route. What it raises and nobody answers is the plugin's fault: noted, and named to the client."""

    def __init__(self, app: ASGIApp, path: str, origin: Origin) -> None:
        self._app, self._path, self._origin = app, path, origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if isinstance(error, HardpointError) or failure_of(error).status < 500:
                raise
            origin = self._origin
            name = origin.entry_point or origin.module
            what = f"endpoint plugin {name} failed at {self._path}: {in_words(error)}"
            note_fault("endpoints", name, what, origin)
            raise PluginError(what, code="endpoint-call") from error


def _watch(route: Any, origin: Origin) -> None:
    if hasattr(route, "app"):
        route.app = _Watched(route.app, getattr(route, "path", ""), origin)


def settle_routes(routes: Sequence[Any], own: set[int], owners: dict[int, Origin]) -> list[Any]:
    """The routes to serve: a plugin's route replaces earlier ones with its path and a method of its.

    own     identities of the routes that were there before any plugin; they are never new
    owners  identity of a plugin's route -> who added it

    A replaced route keeps the methods it does not share; the new one stands where the first
    replaced one stood, ahead of any catch-all. Mounts and websockets stay as they are.
    """
    settled: list[Any] = []
    for route in routes:
        if id(route) in own or not isinstance(route, APIRoute):
            settled.append(route)
            continue
        places = [i for i, earlier in enumerate(settled) if _conflict(earlier, route)]
        _warn_shadowed(settled, route, owners)
        if not places:
            settled.append(route)
            continue
        for i in reversed(places):
            _tell(settled[i], route, owners)
            rest = settled[i].methods - _shared(settled[i], route)
            settled[i : i + 1] = [_with_methods(settled[i], rest)] if rest else []
        settled.insert(places[0], route)
    return settled


def _conflict(earlier: Any, route: APIRoute) -> bool:
    return isinstance(earlier, APIRoute) and earlier.path == route.path and bool(_shared(earlier, route))


def _shared(earlier: APIRoute, route: APIRoute) -> set[str]:
    return (earlier.methods or set()) & (route.methods or set())


def _with_methods(route: APIRoute, methods: set[str]) -> APIRoute:
    # A copy: whoever holds the original route keeps it as it was.
    changed = copy.copy(route)
    changed.methods = set(methods)
    return changed


def _tell(earlier: APIRoute, route: APIRoute, owners: dict[int, Origin]) -> None:
    shared = ", ".join(sorted(_shared(earlier, route)))
    origin = owners.get(id(route), Origin())
    before = owners[id(earlier)].label if id(earlier) in owners else "built in"
    logger.warning("endpoint plugin %s overrides %s %s (%s)", origin.label, shared, route.path, before)
    what = f"replaces the route of: {before}"
    ledger.record("override", "endpoints", f"{shared} {route.path}", origin=origin, detail=what)


def _warn_shadowed(settled: list[Any], route: APIRoute, owners: dict[int, Origin]) -> None:
    """Say so when an earlier route with other parameter names answers first."""
    for earlier in settled:
        if (
            isinstance(earlier, APIRoute)
            and earlier.path != route.path
            and _shape(earlier) == _shape(route)
            and _shared(earlier, route)
        ):
            what = f"{route.path} is never reached: the earlier route {earlier.path} answers the same paths"
            logger.warning("endpoint plugin %s: %s", owners.get(id(route), Origin()).label, what)
            ledger.record("warn", "endpoints", route.path, origin=owners.get(id(route)), detail=what)
            return


def _shape(route: APIRoute) -> str:
    """The path template without the names of its parameters."""
    shape = route.path_format
    for name in route.param_convertors:
        shape = shape.replace("{" + name + "}", "{}")
    return shape


def _origin(plugin: Any) -> Origin:
    found = owner_of(plugin)
    return found.origin if found is not None else Origin(module=type(plugin).__module__)
