"""The suite for endpoint plugins."""

from __future__ import annotations

import argparse
import asyncio
import inspect
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State

from hardpoint.testing.failures import explained, name_of, require, require_call, require_sync

_MEMBERS = ("name", "required_tasks", "attach_router", "init_state")


def check_endpoint_plugin(plugin: Any, engine_client: Any = None) -> FastAPI:
    """Attach the plugin to a fresh application and prepare its state; the application, for requests of your own.

    plugin         what the entry point names (a class or function without arguments), or the plugin itself
    engine_client  what `init_state` gets; None is what a server without an engine gives
    """
    made = _made(plugin)
    subject = name_of(made)
    missing = [name for name in _MEMBERS if not hasattr(made, name)]
    require(not missing, subject, f"it lacks {', '.join(missing)}", "give the plugin these members; see the contract")
    _check_facts(made, subject)
    require_sync(made, subject, "attach_router")
    require_call(made.attach_router, subject, "attach_router(self, app)", FastAPI())
    shape = "async init_state(self, engine_client, state, args)"
    require_call(made.init_state, subject, shape, None, State(), argparse.Namespace())
    require(
        inspect.iscoroutinefunction(made.init_state),
        subject,
        "init_state is not a coroutine function, and the host awaits it",
        "write `async def init_state`",
    )
    app = _attached(made, subject)
    _attached(_made(plugin), subject)
    with explained(subject, "init_state", "keep what the routes need in `state`"):
        asyncio.run(made.init_state(engine_client, app.state, argparse.Namespace()))
    return app


def _made(plugin: Any) -> Any:
    if all(hasattr(plugin, name) for name in _MEMBERS) and not isinstance(plugin, type):
        return plugin
    require(callable(plugin), name_of(plugin), "it is neither a plugin nor a factory", "give a class or function")
    require_call(plugin, name_of(plugin), "a class or function without arguments")
    with explained(name_of(plugin), "the factory", "it is called without arguments, before there is an engine"):
        return plugin()


def _check_facts(plugin: Any, subject: str) -> None:
    require(
        isinstance(plugin.name, str) and plugin.name, subject, f"name is {plugin.name!r}", "give the entry point's name"
    )
    tasks = plugin.required_tasks
    require(
        tasks is None or (isinstance(tasks, (tuple, list)) and all(isinstance(task, str) for task in tasks)),
        subject,
        f"required_tasks is {tasks!r}",
        'give None, or a tuple such as ("generate",)',
    )


def _attached(plugin: Any, subject: str) -> FastAPI:
    app = FastAPI()
    before = len(app.routes)
    with explained(subject, "attach_router", "it only adds routes; what needs an engine belongs into init_state"):
        plugin.attach_router(app)
    require(len(app.routes) > before, subject, "attach_router adds no route", "add at least one route to `app`")
    with explained(subject, "the OpenAPI description of its routes", "give the handlers types that pydantic knows"):
        app.openapi()
    return app
