"""The tour "Build a toy plugin", stop by stop, from its own blocks: installed with pip, run in a fresh environment.

One substitution: the default model stands for the gated checkpoint.
"""

from __future__ import annotations

import ast
import json
import shlex
import tomllib
from pathlib import Path

import pytest

from process_tools import wait_until
from server_process import ServerProcess

pytestmark = pytest.mark.server

BLOCKS = Path(__file__).parent / "blocks"
EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "toy"
GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_greedy.json"
PACKAGE = "vllm_toy_plugin"
MODULES = ("__init__.py", "model.py", "ops.py", "stat_logger.py", "endpoint.py")
# One RMSNorm before attention and one before the MLP in each of 30 layers, and the last one.
NORMS = 2 * 30 + 1


def block(name: str) -> str:
    return (BLOCKS / f"{name}.txt").read_text(encoding="utf-8")


def start_lines() -> list[list[str]]:
    """The commands of stop 8, each as its words."""
    return [shlex.split(line, comments=True) for line in block("start.sh").replace("\\\n", " ").splitlines() if line]


@pytest.fixture(scope="module")
def toured(make_environment, tmp_path_factory):
    """Stops 1 to 4, 6 and 7: the package of the tour, installed as stop 8 says."""
    project = tmp_path_factory.mktemp("tour") / "vllm-toy-plugin"
    (project / PACKAGE).mkdir(parents=True)
    (project / "pyproject.toml").write_text(block("pyproject.toml"), encoding="utf-8")
    for name in MODULES:
        (project / PACKAGE / name).write_text(block(name), encoding="utf-8")
    environment = make_environment()
    assert start_lines()[0] == ["pip", "install", "-e", f"./{project.name}"]
    environment.install(project, "-e")
    return environment


@pytest.fixture(scope="module")
def server(toured, smollm2_gguf):
    """Stop 8, with the DEBUG log of stop 9."""
    variables = {**toured.variables, "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_LOG_STATS_INTERVAL": "1"}
    name, _, names = start_lines()[2][1].partition("=")
    [program, serve, _, *flags] = start_lines()[3]
    assert (name, program, serve) == ("VLLM_PLUGINS", "vllm", "serve")
    with ServerProcess(
        smollm2_gguf, *flags, program=[str(toured.bin / program)], env={**variables, name: names}
    ) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def completion(server):
    [case] = [case for case in cases() if case["prompt"] == "The capital of France is"]
    answer = server.complete(case["prompt"], max_tokens=12, return_token_ids=True).json()
    return answer, case


def cases() -> list[dict]:
    return [c for c in json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"] if c["kind"] == "completion"]


@pytest.fixture(scope="module")
def ledger(server, completion):
    return server.ledger()


def test_the_quick_check_works_in_plain_python(toured, tmp_path):
    script = tmp_path / "quick_check.py"
    script.write_text(block("quick_check.py"), encoding="utf-8")
    assert toured.run("python", str(script)).stdout.splitlines()[-3:] == [
        "True",
        "{'RMSNorm': <class 'vllm_toy_plugin.ops.ToyRMSNorm'>}",
        "[<class 'vllm_toy_plugin.stat_logger.ToyStatLogger'>]",
    ]


def test_the_curl_of_stop_8_is_answered(server):
    [curl, url] = start_lines()[4]
    assert curl == "curl"
    answer = server.http.get(url.removeprefix("http://localhost:8000"))
    assert answer.json() == {"plugin": "vllm_toy_plugin", "status": "loaded"}


def test_the_toy_model_writes_what_the_plain_one_writes(completion):
    answer, case = completion
    assert answer["choices"][0]["token_ids"] == case["generated_ids"][:12]


def test_every_norm_of_the_model_is_the_toys(server, ledger):
    [entry] = [e for e in ledger if (e["kind"], e["key"], e["name"]) == ("override", "oot_ops", "RMSNorm")]
    assert f"vllm_toy_plugin.ops.ToyRMSNorm in place of RMSNorm, built {NORMS} times" in entry["detail"]
    assert "runs forward_cpu" in entry["detail"]
    assert "worker" in entry["role"]
    assert entry["origin"]["entry_point"] == "toy_register"
    assert f"'RMSNorm': {NORMS}" in server.log()


def test_each_process_registers_and_only_the_front_end_has_logger_and_route(ledger):
    def roles(kind, key, name):
        return [e["role"] for e in ledger if (e["kind"], e["key"], e["name"]) == (kind, key, name)]

    everywhere = ["front_end", "engine_core"]
    assert roles("call", "general", "toy_register") == everywhere
    assert roles("register", "models", "ToyLlamaForCausalLM") == everywhere
    assert roles("register", "oot_ops", "RMSNorm") == everywhere
    assert roles("load", "stat_loggers", "toy_stat_logger") == ["front_end"]
    assert roles("call", "endpoints", "toy_endpoint") == ["front_end"]
    assert roles("skip", "general", "lora_filesystem_resolver") == everywhere
    assert {e["origin"]["distribution"] for e in ledger if e["name"].startswith("toy_")} == {"vllm-toy-plugin"}


@pytest.mark.parametrize(
    ("line", "times"),
    [
        ("VLLM_PLUGINS names 'toy_register', 'toy_stat_logger', 'toy_endpoint': no other plugin loads", 2),
        ("toy_register = vllm_toy_plugin:register (vllm-toy-plugin 0.1.0): loads", 2),
        ("lora_filesystem_resolver = hardpoint.extensions.lora_resolvers:register_filesystem_resolver "
         "(built in): left out, not named in VLLM_PLUGINS", 2),
        ("toy_stat_logger = vllm_toy_plugin.stat_logger:ToyStatLogger (vllm-toy-plugin 0.1.0): loads", 1),
        ("Instantiating custom op: RMSNorm using vllm_toy_plugin.ops.ToyRMSNorm", NORMS),
        ("toy: engine 0 is ready", 1),
        ("endpoint plugin 'toy_endpoint' (vllm-toy-plugin 0.1.0) is loaded", 1),
    ],
)  # fmt: skip
def test_a_debug_start_shows_each_part(server, line, times):
    lines = [shown for shown in server.lines(line) if "plugins of" not in shown]
    assert len(lines) == times, lines


def test_the_stat_logger_counts_the_tokens_of_the_answers(server, completion):
    tokens = completion[0]["usage"]["completion_tokens"]
    assert tokens == 12
    assert wait_until(lambda: f"toy: engine 0 generated {tokens} tokens" in server.log())
    seen = server.log().count("toy: engine 0 generated")
    # It goes on each interval.
    assert wait_until(lambda: server.log().count("toy: engine 0 generated") > seen)


def test_the_example_is_the_package_of_the_tour():
    for name in MODULES:
        ours = (EXAMPLE / PACKAGE / name).read_text(encoding="utf-8")
        assert code_of(ours) == code_of(block(name)), name
    ours = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    theirs = tomllib.loads(block("pyproject.toml"))
    assert ours["build-system"] == theirs["build-system"]
    assert ours["tool"] == theirs["tool"]
    assert {key: ours["project"][key] for key in theirs["project"]} == theirs["project"]


def code_of(source: str) -> str:
    """The program without comments, docstrings, annotations of results, and `pass`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [part for part in body if not (is_text(part) or isinstance(part, ast.Pass))]
    return ast.unparse(tree)


def is_text(part: ast.stmt) -> bool:
    return isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str)
