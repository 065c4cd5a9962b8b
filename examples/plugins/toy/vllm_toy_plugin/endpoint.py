"""The toy endpoint: one route that needs no engine."""

from fastapi import FastAPI


class ToyEndpointPlugin:
    """Its own factory: the entry point names the class, which takes no arguments."""

    name = "toy_endpoint"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the route."""

        @app.get("/v1/toy/hello")
        async def hello():
            return {"plugin": "vllm_toy_plugin", "status": "loaded"}

    async def init_state(self, engine_client, state, args) -> None:
        """Nothing to keep."""
