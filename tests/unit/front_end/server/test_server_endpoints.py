"""Endpoint plugins: both phases, who replaces whom, and what is told."""

from __future__ import annotations

import logging

import pytest
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.routing import APIRoute
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from hardpoint.extensions.ledger import ledger
from hardpoint.front_end.server.endpoints import settle_routes
from hardpoint.front_end.server.route_table import flatten_routes


class Plugin:
    """A plugin made of a function that adds routes."""

    def __init__(self, attach, name="p", init=None):
        self.name = name
        self.required_tasks = None
        self._attach, self._init = attach, init

    def attach_router(self, app):
        self._attach(app)

    async def init_state(self, engine_client, state, args):
        if self._init:
            self._init(engine_client, state, args)


def answers(app, path, text, methods=("GET",)):
    async def endpoint():
        return PlainTextResponse(text)

    app.add_api_route(path, endpoint, methods=list(methods))


def test_routes_are_added_and_state_follows(make_server, run, endpoint_plugins):
    seen = {}

    def attach(app):
        @app.get("/v1/admin")
        async def admin(raw_request: Request):
            engine = raw_request.app.state.mine
            if engine is None:
                raise HTTPException(503, "no engine")
            return {"results": await engine.collective_rpc("get_config")}

    def init(engine_client, state, args):
        seen["args"] = args
        assert state.openai_serving_chat is not None, "core state comes first"
        state.mine = engine_client

    plugin = Plugin(attach, init=init)
    endpoint_plugins.use(plugin)

    async def check():
        server = await make_server(custom_flag=3)
        assert server.app.state.endpoint_plugins == [plugin]
        assert seen["args"].custom_flag == 3
        assert (await server.http.get("/v1/admin")).json() == {"results": [{"rank": 0}, 7, None]}
        assert "/v1/admin" in (await server.http.get("/openapi.json")).json()["paths"]
        server.app.state.mine = None
        refused = await server.http.get("/v1/admin")
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "no engine")

    run(check())


def test_no_plugins_leave_an_empty_list(make_server, run):
    async def check():
        assert (await make_server()).app.state.endpoint_plugins == []

    run(check())


def test_core_route_is_replaced_with_a_warning(make_server, run, endpoint_plugins, caplog):
    endpoint_plugins.use(Plugin(lambda app: answers(app, "/v1/models", "mine")))

    async def check():
        server = await make_server()
        assert (await server.http.get("/v1/models")).text == "mine"
        assert sum(r.path == "/v1/models" for r in server.app.routes) == 1
        # Others of the same family are untouched.
        assert (await server.http.get("/v1/models/tiny")).json()["id"] == "tiny"

    logging.getLogger("hardpoint").propagate = True
    with caplog.at_level("WARNING"):
        run(check())
    assert any("overrides GET /v1/models" in record.getMessage() for record in caplog.records)
    (entry,) = ledger.entries(kind="override", key="endpoints")
    assert entry.name == "GET /v1/models"


def test_later_plugin_replaces_an_earlier_one(make_server, run, endpoint_plugins):
    endpoint_plugins.use(
        Plugin(lambda app: answers(app, "/x", "one", ["GET", "POST"]), "a"),
        Plugin(lambda app: answers(app, "/x", "two", ["POST", "PUT"]), "b"),
    )

    async def check():
        server = await make_server()
        found = {method: (await server.http.request(method, "/x")).text for method in ("GET", "POST", "PUT")}
        assert found == {"GET": "one", "POST": "two", "PUT": "two"}

    run(check())


def test_replacement_stands_where_the_replaced_stood(make_server, run, endpoint_plugins):
    """Ahead of a catch-all that comes later in the list."""

    def attach(app):
        app.mount("/v1", FastAPI())
        answers(app, "/v1/models", "mine")

    endpoint_plugins.use(Plugin(attach))

    async def check():
        server = await make_server()
        assert (await server.http.get("/v1/models")).text == "mine"

    run(check())


def test_included_routers_take_part(make_server, run, endpoint_plugins):
    def check_header(request: Request):
        if "x-pass" not in request.headers:
            raise HTTPException(418, "no pass")

    def attach(app):
        inner = APIRouter(prefix="/deep")
        answers(inner, "/one", "deep one")
        router = APIRouter(prefix="/v1", dependencies=[Depends(check_header)])
        answers(router, "/models", "mine")
        router.include_router(inner)
        app.include_router(router)

    endpoint_plugins.use(Plugin(attach))

    async def check():
        server = await make_server()
        assert (await server.http.get("/v1/models")).status_code == 418
        assert (await server.http.get("/v1/models", headers={"x-pass": "1"})).text == "mine"
        assert (await server.http.get("/v1/deep/one", headers={"x-pass": "1"})).text == "deep one"
        assert (await server.http.get("/v1/deep/one")).status_code == 418

    run(check())


def test_other_parameter_names_are_told_apart(make_server, run, endpoint_plugins, caplog):
    endpoint_plugins.use(Plugin(lambda app: answers(app, "/v1/models/{other:path}", "mine")))

    async def check():
        server = await make_server()
        assert (await server.http.get("/v1/models/tiny")).json()["id"] == "tiny"

    run(check())
    (entry,) = ledger.entries(kind="warn", key="endpoints")
    assert "never reached" in entry.detail


def test_what_a_route_raises_is_noted_and_names_the_plugin(make_server, run, endpoint_plugins):
    inner = FastAPI()

    @inner.get("/deep")
    async def deep():
        raise LookupError("deep down")

    def attach(app):
        @app.get("/v1/raises")
        async def raises():
            raise KeyError("no such shelf")

        @app.get("/v1/refuses")
        async def refuses():
            raise HTTPException(409, "not now")

        app.mount("/mounted", inner)

    endpoint_plugins.use(Plugin(attach))

    async def check():
        server = await make_server()
        known = len(ledger.entries(kind="fault", key="endpoints"))
        for path, reason in (("/v1/raises", "KeyError: 'no such shelf'"), ("/mounted/deep", "LookupError: deep down")):
            answer = await server.http.get(path)
            assert answer.status_code == 500
            if path != "/mounted/deep":  # An application of its own answers in its own words.
                assert f"endpoint plugin {__name__}" in answer.json()["error"]["message"]
                assert reason in answer.json()["error"]["message"]
            entry = ledger.entries(kind="fault", key="endpoints")[-1]
            assert reason in entry.detail
            assert "uninstall" in entry.fix
        assert (await server.http.get("/v1/refuses")).status_code == 409
        assert (await server.http.get("/health")).status_code == 200
        assert len(ledger.entries(kind="fault", key="endpoints")) == known + 2

    run(check())


@pytest.mark.parametrize("phase", ["attach", "init"])
def test_what_a_plugin_raises_stops_the_start(make_server, run, endpoint_plugins, phase):
    def bad(*_):
        raise LookupError("plugin broke")

    endpoint_plugins.use(Plugin(bad) if phase == "attach" else Plugin(lambda app: None, init=bad))

    async def check():
        with pytest.raises(LookupError, match="plugin broke"):
            await make_server()

    run(check())


def test_middleware_of_a_plugin_wraps_the_routes(make_server, run, endpoint_plugins):
    class Header:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            async def more(message):
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-plugin", b"1")]
                await send(message)

            await self.app(scope, receive, more)

    endpoint_plugins.use(Plugin(lambda app: app.add_middleware(Header)))

    async def check():
        server = await make_server(api_key=["k"])
        assert "x-plugin" not in (await server.http.get("/v1/models")).headers
        assert (await server.http.get("/health")).headers["x-plugin"] == "1"

    run(check())


# -- the rules by themselves --------------------------------------------------------------------------


async def nothing():
    return None


def route(path, *methods):
    return APIRoute(path, nothing, methods=list(methods) or ["GET"])


def settled(own, new):
    return settle_routes([*own, *new], {id(r) for r in own}, {})


def test_full_overlap_removes_the_earlier():
    first, other, new = route("/a"), route("/b"), route("/a")
    assert settled([first, other], [new]) == [new, other]


def test_partial_overlap_keeps_a_copy_with_the_rest():
    first, new = route("/a", "GET", "POST"), route("/a", "POST")
    left, right = settled([first], [new])
    assert left is new
    assert right.methods == {"GET"}
    assert first.methods == {"GET", "POST"}, "the original is changed"


def test_no_overlap_keeps_the_order():
    first, new = route("/a", "GET"), route("/a", "POST")
    assert settled([first], [new]) == [first, new]


def test_one_route_replaces_several():
    get, post, new = route("/a", "GET"), route("/a", "POST"), route("/a", "GET", "POST")
    assert settled([get, route("/z"), post], [new])[0] is new
    assert len(settled([get, post], [new])) == 1


def test_other_kinds_of_route_are_left_alone():
    plain, mount, new = Route("/a", nothing), Mount("/a", FastAPI()), route("/a")
    assert settled([plain, mount], [new]) == [plain, mount, new]
    assert settle_routes([route("/a"), plain], set(), {})[-1] is plain


def test_flattening_keeps_what_is_flat():
    app = FastAPI()
    answers(app, "/a", "a")
    before = list(app.routes)
    flatten_routes(app)
    assert [id(r) for r in app.routes] == [id(r) for r in before]
