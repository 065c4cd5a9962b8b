"""The API key covers every route but the named few; CORS; root path."""

from __future__ import annotations

import pytest
from fastapi.routing import APIRoute
from starlette.routing import Mount, Route, WebSocketRoute

from hardpoint.errors import ConfigError

KEY = {"Authorization": "Bearer k1"}
OPEN = {
    ("GET", "/"), ("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/metrics"),
    ("GET", "/metrics/{rest:path}"),
}  # fmt: skip


def every_route(app):
    """(method, path) of every route the application has, docs included."""
    for route in app.routes:
        assert isinstance(route, APIRoute | Route | WebSocketRoute | Mount), route
        if isinstance(route, Route | APIRoute):
            for method in route.methods or ():
                yield method, route.path


def test_every_route_asks_for_the_key(make_server, run, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")

    async def check():
        server = await make_server(api_key=["k1", "k2"], enable_tokenizer_info_endpoint=True)
        routes = set(every_route(server.app))
        assert len(routes) > 40
        for method, path in sorted(routes):
            target = path.replace("{rest:path}", "x").replace("{name:path}", "tiny")
            answer = await server.http.request(method, target)
            if (method, path) in OPEN:
                assert answer.status_code != 401, path
            else:
                assert answer.status_code == 401, (method, path)
                if method != "HEAD":
                    error = answer.json()["error"]
                    if path.startswith("/v1/messages"):  # Anthropic's shape has no code.
                        assert error["type"] == "authentication_error"
                    else:
                        assert error["code"] == 401
        assert routes >= OPEN

    run(check())


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/v1/nothing", "/metricsx", "/metrics/../v1/models", "//health", "/health/", "/HEALTH", "/docs"],
)
def test_other_paths_ask_for_it_too(make_server, run, asgi_call, path):
    async def check():
        server = await make_server(api_key=["k1"])
        call = asgi_call(server.app, "GET", path)
        await call.run()
        if path == "/metrics/../v1/models":
            # No path is folded: this is a question to /metrics.
            assert b"# HELP" in b"".join(call.chunks)
        else:
            assert call.status == 401

    run(check())


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer k1", 200),
        ("bearer k2", 200),
        ("Bearer  k2", 200),
        ("Bearer k3", 401),
        ("Bearer k1x", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Basic k1", 401),
        ("k1", 401),
        ("", 401),
        (None, 401),
    ],
)
def test_only_the_right_key_opens(make_server, run, header, status):
    async def check():
        server = await make_server(api_key=["k1", "k2"])
        headers = {} if header is None else {"Authorization": header}
        assert (await server.http.get("/v1/models", headers=headers)).status_code == status

    run(check())


def test_two_authorization_headers_are_none(make_server, run, asgi_call):
    async def check():
        server = await make_server(api_key=["k1"])
        call = asgi_call(server.app, "GET", "/v1/models")
        call.scope["headers"] += [(b"authorization", b"Bearer no"), (b"authorization", b"Bearer k1")]
        await call.run()
        assert call.status == 401

    run(check())


def test_key_from_the_environment(make_server, run, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k1")

    async def check():
        server = await make_server()
        assert (await server.http.get("/v1/models")).status_code == 401
        assert (await server.http.get("/v1/models", headers=KEY)).status_code == 200
        # The flag wins.
        other = await make_server(api_key=["k9"])
        assert (await other.http.get("/v1/models", headers=KEY)).status_code == 401

    run(check())


def test_without_a_key_all_is_open(make_server, run):
    async def check():
        assert (await (await make_server()).http.get("/v1/models")).status_code == 200

    run(check())


def test_an_empty_key_is_no_key(make_server, run, monkeypatch, caplog):
    async def check():
        with pytest.raises(ConfigError, match="empty"):
            await make_server(api_key=["k1", ""])
        monkeypatch.setenv("VLLM_API_KEY", "")
        await make_server()

    run(check())


def test_refused_before_the_body_is_read(make_server, run, asgi_call):
    async def check():
        server = await make_server(api_key=["k1"])
        call = asgi_call(server.app, "POST", "/v1/completions", b"{}")
        await call.run()
        assert call.status == 401
        assert call._body, "the body was read"

    run(check())


def test_plugin_routes_ask_for_the_key_even_in_open_places(make_server, run, endpoint_plugins):
    class Plugin:
        name = "p"
        required_tasks = None

        def attach_router(self, app):
            for path in ("/mine", "/health", "/"):

                @app.get(path)
                async def hello():
                    return {"from": "plugin"}

            @app.post("/metrics")
            async def post():
                return {}

        async def init_state(self, engine_client, state, args):
            pass

    endpoint_plugins.use(Plugin())

    async def check():
        server = await make_server(api_key=["k1"])
        for method, path in (("GET", "/mine"), ("GET", "/health"), ("GET", "/"), ("POST", "/metrics")):
            assert (await server.http.request(method, path)).status_code == 401, path
            assert (await server.http.request(method, path, headers=KEY)).status_code == 200, path
        assert (await server.http.get("/ping")).status_code == 200

    run(check())


def test_websockets_ask_for_the_key(make_server, run, endpoint_plugins):
    reached = []

    class Plugin:
        name = "p"
        required_tasks = None

        def attach_router(self, app):
            @app.websocket("/ws")
            async def ws(websocket):
                reached.append(1)

        async def init_state(self, engine_client, state, args):
            pass

    endpoint_plugins.use(Plugin())

    async def check():
        server = await make_server(api_key=["k1"])
        sent = []

        async def receive():
            return {"type": "websocket.connect"}

        async def send(message):
            sent.append(message)

        scope = {
            "type": "websocket",
            "path": "/ws",
            "headers": [],
            "query_string": b"",
            "root_path": "",
        }
        await server.app(scope, receive, send)
        assert sent == [{"type": "websocket.close", "code": 1008, "reason": "Unauthorized"}]
        assert not reached

    run(check())


def test_root_path_is_seen_through(make_server, run):
    async def check():
        server = await make_server(api_key=["k1"], root_path="/api")
        assert (await server.http.get("/api/health")).status_code == 200
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/api/v1/models")).status_code == 401
        assert (await server.http.get("/api/v1/models", headers=KEY)).status_code == 200

    run(check())


# -- CORS ---------------------------------------------------------------------------------------------

PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


def test_preflight_needs_no_key(make_server, run):
    async def check():
        server = await make_server(api_key=["k1"], allowed_origins=["https://a.example"], allow_credentials=True)
        answer = await server.http.options("/v1/completions", headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert answer.headers["access-control-allow-credentials"] == "true"
        # Other OPTIONS requests are no preflight.
        assert (await server.http.options("/v1/completions")).status_code == 401
        other = await server.http.options("/v1/models", headers={**PREFLIGHT, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers

    run(check())


def test_cors_headers_are_on_answers_and_refusals(make_server, run):
    async def check():
        server = await make_server(api_key=["k1"], allowed_origins=["*"])
        origin = {"Origin": "https://a.example"}
        for headers in ({**origin, **KEY}, origin):
            answer = await server.http.get("/v1/models", headers=headers)
            assert answer.headers["access-control-allow-origin"] == "*"

    run(check())


def test_allowed_methods_and_headers_follow_their_flags(make_server, run):
    async def check():
        server = await make_server(allowed_origins=["*"], allowed_methods=["GET"], allowed_headers=["X-One"])
        refused = await server.http.options("/v1/completions", headers=PREFLIGHT)
        assert refused.status_code == 400
        asked = {**PREFLIGHT, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "X-One"}
        assert (await server.http.options("/v1/models", headers=asked)).status_code == 200

    run(check())


def test_no_cors_by_default(make_server, run):
    async def check():
        server = await make_server()
        answer = await server.http.options("/v1/completions", headers=PREFLIGHT)
        assert answer.status_code == 405
        assert answer.json()["error"]["type"] == "Method Not Allowed"
        plain = await server.http.get("/v1/models", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in plain.headers

    run(check())
