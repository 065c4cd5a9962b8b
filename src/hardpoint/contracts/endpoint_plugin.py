"""Adding HTTP routes: what an endpoint plugin implements."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State

    from hardpoint.contracts.engine_client import EngineClient


@runtime_checkable
class EndpointPlugin(Protocol):
    """Adds routes to the HTTP server. Any object with these four members will do.

    Built   by its factory in the front end, once per server process, if VLLM_PLUGINS names it and the
            model does one of its `required_tasks` (None: no task needed).
    Called  attach_router: once, after our own routes exist. init_state: once, when the engine is ready
            and the server's own state is set.
    Blocks  attach_router must not; init_state is awaited before the server takes requests.
    Fault   a factory that raises, or an object without these members, is logged and left out.
            What attach_router or init_state raise stops the start.

    A route with the path template and a method of an earlier one takes its place. Routes are covered
    by the API key like ours. Reach the engine through `engine_client` only.
    """

    name: str
    required_tasks: tuple[str, ...] | None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Keep what the routes need in `state`; `engine_client` is None on a server without an engine."""
