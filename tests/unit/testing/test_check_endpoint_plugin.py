from __future__ import annotations

import pytest

from hardpoint.testing import ContractFailure, check_endpoint_plugin


class Good:
    name = "good"
    required_tasks = None

    def attach_router(self, app):
        @app.get("/v1/good")
        async def good():
            return {"good": True}

    async def init_state(self, engine_client, state, args):
        state.good = True


def bad(**members):
    return type("Bad", (Good,), members)


@pytest.mark.parametrize("plugin", [Good, Good(), lambda: Good()])
def test_good_ones(plugin):
    app = check_endpoint_plugin(plugin)
    assert app.state.good
    assert "/v1/good" in [route.path for route in app.routes]


class Lacks:
    name = "x"


@pytest.mark.parametrize(
    ("plugin", "what"),
    [
        (3, "neither a plugin nor a factory"),
        (Lacks, "it lacks required_tasks, attach_router, init_state"),
        (bad(__init__=lambda self, needed: None), "cannot be called as the host"),
        (bad(__init__=lambda self: 1 / 0), "the factory raises ZeroDivisionError"),
        (bad(name=""), "name is ''"),
        (bad(required_tasks="generate"), r"required_tasks is 'generate'\. Fix: give None, or a tuple"),
        (bad(attach_router=lambda self: None), "cannot be called as the host"),
        (bad(attach_router=lambda self, app: None), "attach_router adds no route"),
        (bad(attach_router=lambda self, app: app.get("/x")(lambda y: 1).nothing), "attach_router raises"),
        (bad(attach_router=Good.init_state), "attach_router is a coroutine function"),
        (bad(init_state=lambda self, client, state, args: None), "init_state is not a coroutine function"),
    ],
)
def test_bad_ones(plugin, what):
    with pytest.raises(ContractFailure, match=what):
        check_endpoint_plugin(plugin)


def test_state_that_cannot_be_kept():
    async def init_state(self, engine_client, state, args):
        engine_client.vllm_config  # noqa: B018 - there is no engine

    with pytest.raises(ContractFailure, match="init_state raises AttributeError"):
        check_endpoint_plugin(bad(init_state=init_state))
    check_endpoint_plugin(bad(init_state=init_state), engine_client=type("Client", (), {"vllm_config": 1}))
