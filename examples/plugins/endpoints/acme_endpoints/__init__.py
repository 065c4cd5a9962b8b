"""An endpoint plugin: routes of our own on the server. The class is its own factory."""

from typing import Any

from fastapi import FastAPI, Request


class AcmeEndpoint:
    """Loads only where VLLM_PLUGINS names it, and where the model does one of `required_tasks` (None: always)."""

    name = "acme_endpoints"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Once, after the server's own routes exist: add ours."""

        @app.get("/v1/acme/hello")
        async def hello(request: Request) -> dict[str, Any]:
            """Covered by the API key like every route."""
            return {"plugin": "acme", "model": request.app.state.acme_model}

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Once, when the engine is ready: keep what the routes need."""
        state.acme_model = engine_client.model_config.served_model_name
