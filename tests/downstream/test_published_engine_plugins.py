"""Published plugins that act inside the engine core: a slot-keyed logits processor and a scheduler."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from downstream_packages import folder_of, python_path

from hardpoint.testing import make_plugin
from process_tools import wait_until
from server_process import ServerProcess

pytestmark = pytest.mark.server

BOUNDARIES = "simulst==0.1.0"
TRACING = "traceloom-vllm-context==0.1.0"

# simulst: turn boundaries are never a matter of luck

ARCHITECTURE = "HYV3SpeechForCausalLM"
TURN_END, CHOSEN, OTHER = 40, 41, 42

# The speech model the processor belongs to is a large one; a Llama stands in for it.
STAND_IN = f"""
def register():
    from vllm import ModelRegistry
    ModelRegistry.register_model("{ARCHITECTURE}", "vllm.model_executor.models.llama:LlamaForCausalLM")
"""


@pytest.fixture(scope="module")
def translator(make_tiny_llama, tmp_path_factory) -> Iterator[ServerProcess]:
    model = make_tiny_llama(architectures=[ARCHITECTURE], turn_end_token_id=TURN_END)
    entry_points = {"vllm.general_plugins": {"stand_in": "stand_in:register"}}
    stand_in = make_plugin(tmp_path_factory.mktemp("stand-in"), "stand-in", STAND_IN, entry_points)
    # Logits processors load whatever the allowlist says.
    variables = {"PYTHONPATH": f"{folder_of(BOUNDARIES)}:{stand_in.folder}", "VLLM_PLUGINS": "stand_in"}
    with ServerProcess(model, env=variables) as server:
        yield server.wait_ready()


def counts(server: ServerProcess, biases: dict[int, int], temperature: float = 10) -> dict[int, int]:
    """How often each biased token comes, of 48: a distance of 10 costs a factor of e^(10 / temperature)."""
    bias = {str(token): value for token, value in biases.items()}
    sampling = {"temperature": temperature, "seed": 5, "ignore_eos": True, "return_token_ids": True}
    answer = server.complete(max_tokens=48, logit_bias=bias, **sampling)
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["choices"][0]["token_ids"]
    return {token: tokens.count(token) for token in biases}


def test_a_boundary_that_is_not_the_best_token_is_never_drawn(translator, plain):
    biases = {CHOSEN: 100, TURN_END: 90, OTHER: 90}
    without = counts(plain, biases)
    assert min(without.values()) > 3, "the plain server draws each of them"
    guarded = counts(translator, biases)
    assert guarded[TURN_END] == 0
    assert min(guarded[CHOSEN], guarded[OTHER]) > 3


def test_a_boundary_that_is_the_best_token_may_be_drawn(translator):
    drawn = counts(translator, {TURN_END: 100, CHOSEN: 90})
    assert min(drawn.values()) > 3


def test_greedy_requests_are_left_alone(translator, plain):
    greedy = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    assert translator.complete(**greedy).json()["choices"] == plain.complete(**greedy).json()["choices"]


def test_it_came_by_entry_point_and_its_general_plugin_stayed_out(translator):
    its = [
        (entry["kind"], entry["name"], entry["role"])
        for entry in translator.http.get("/plugins").json()["ledger"]
        if (entry["origin"] or {}).get("distribution") == "simulst"
    ]
    assert ("load", "simulst_boundary", "front_end") in its
    assert ("skip", "simulst_mm", "front_end") in its
    assert "logits processors in order: simulst_mm.model.boundary.BoundaryGreedyLogitsProcessor" in translator.log()


# traceloom-vllm-context: a line for each step


def traced(tiny_llama: Path, folder: Path, scheduler: str, *flags: str) -> ServerProcess:
    variables = {
        "PYTHONPATH": python_path(TRACING),
        "TRACELOOM_CONTEXT_DIR": str(folder),
        "TRACELOOM_RUN_ID": "run-1",
    }
    return ServerProcess(tiny_llama, "--scheduler-cls", f"traceloom_vllm_scheduler.{scheduler}", *flags, env=variables)


def test_tracing_scheduler_writes_a_line_per_step_and_changes_nothing(tiny_llama, tmp_path, plain):
    asked = {"prompt": "The quick", "max_tokens": 12, "ignore_eos": True}
    with traced(tiny_llama, tmp_path, "TracingScheduler") as server:
        server.wait_ready()
        answer, expected = (of.complete(**asked).json() for of in (server, plain))
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0
        server.assert_nothing_left()
    assert answer["choices"] == expected["choices"]
    [file] = tmp_path.iterdir()
    session, *steps, summary = [json.loads(line) for line in file.read_text().splitlines()]
    assert (session["type"], session["metadata"]["runtime_version"]) == ("session", "0.32.0")
    # The prompt at once, then a token at a time; the last one is not computed again.
    scheduled = [step["total_scheduled_tokens"] for step in steps if step["total_scheduled_tokens"]]
    assert scheduled == [answer["usage"]["prompt_tokens"], *[1] * 11]
    assert {step["type"] for step in steps} == {"step"}
    assert [step["requests"][0]["payload_kind"] for step in steps[:2]] == ["new", "cached"]
    assert all(0 < step["cache"]["free_blocks"] < step["cache"]["pool_blocks"] for step in steps)
    assert (summary["type"], summary["written_records"], summary["dropped_records"]) == ("summary", len(steps), 0)


def test_its_asynchronous_scheduler_plans_ahead_and_changes_nothing(tiny_llama, tmp_path, plain):
    asked = {"prompt": "The quick", "max_tokens": 12, "ignore_eos": True}
    with traced(tiny_llama, tmp_path, "TracingAsyncScheduler") as server:
        server.wait_ready()
        answer, expected = (of.complete(**asked).json() for of in (server, plain))
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0
        server.assert_nothing_left()
    assert answer["choices"] == expected["choices"]
    [file] = tmp_path.iterdir()
    steps = [line for line in map(json.loads, file.read_text().splitlines()) if line["type"] == "step"]
    scheduled = [step["total_scheduled_tokens"] for step in steps if step["total_scheduled_tokens"]]
    # Nothing is planned past the last token, since its number is known beforehand.
    assert scheduled == [answer["usage"]["prompt_tokens"], *[1] * 11]


def test_its_synchronous_scheduler_is_refused_where_planning_ahead_is_asked_for(tiny_llama, tmp_path):
    with traced(tiny_llama, tmp_path, "TracingScheduler", "--async-scheduling") as server:
        assert server.exit_status() == 1
        assert wait_until(lambda: "TracingScheduler cannot schedule asynchronously" in server.log()), server.log()
        assert "the model is loaded" not in server.log()
