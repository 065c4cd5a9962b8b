"""An application's routes as one flat list.

Newer FastAPI keeps an included router as one opaque entry and works its routes out while
matching; replacing a single route, or telling which routes need a key, takes the flat form.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import fastapi.routing
from fastapi import FastAPI
from fastapi.routing import APIRoute

_contexts = getattr(fastapi.routing, "iter_route_contexts", None)


def flatten_routes(app: FastAPI) -> None:
    """Replace each included router by its routes; other entries keep their identity."""
    app.router.routes[:] = list(_flat(app.router.routes))


def _flat(routes: Sequence[Any]) -> Iterator[Any]:
    if _contexts is None:
        yield from routes
        return
    known = {id(route) for route in routes}
    for context in _contexts(routes):
        if id(context.route) in known:
            yield context.route
        elif isinstance(context.original_route, APIRoute):
            yield _rebuilt(context)
        else:
            yield context.starlette_route


def _rebuilt(context: Any) -> APIRoute:
    """The route as it is seen through the routers that include it."""
    kind = type(context.original_route)
    names = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "path", "endpoint")]
    facts = {name: getattr(context, name) for name in names if hasattr(context, name)}
    return kind(context.path, context.endpoint, **facts)
