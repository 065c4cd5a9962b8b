from hardpoint.contracts.endpoint_plugin import EndpointPlugin


class Mine:
    name = "mine"
    required_tasks = None

    def attach_router(self, app): ...

    async def init_state(self, engine_client, state, args): ...


def test_four_members_make_an_endpoint_plugin():
    assert isinstance(Mine(), EndpointPlugin)
    for member in ("name", "required_tasks", "attach_router", "init_state"):
        body = {key: value for key, value in vars(Mine).items() if key != member and not key.startswith("__")}
        assert not isinstance(type("Less", (), body)(), EndpointPlugin)
