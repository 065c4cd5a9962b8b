from pathlib import Path
from types import SimpleNamespace

from acme_endpoints import AcmeEndpoint

from hardpoint.testing import check_endpoint_plugin, check_project, project_plugin

PROJECT = Path(__file__).parent.parent

CLIENT = SimpleNamespace(model_config=SimpleNamespace(served_model_name="m"))


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_endpoints": AcmeEndpoint}


def test_it_keeps_the_contract():
    app = check_endpoint_plugin(AcmeEndpoint, engine_client=CLIENT)
    assert app.state.acme_model == "m"


def test_the_route_answers(hardpoint_server, tmp_path):
    plugin = project_plugin(PROJECT, tmp_path)
    server = hardpoint_server("--served-model-name", "m", plugins=[plugin], VLLM_PLUGINS="acme_endpoints")
    assert server.get("/v1/acme/hello") == (200, {"plugin": "acme", "model": "m"})
