"""Logits processors on a real server: both interfaces at once, and state that stays with its request (bug B12).

The oracle of every mix is the same request run alone.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from hardpoint.testing import make_plugin
from process_tools import wait_until
from server_process import ServerProcess

pytestmark = pytest.mark.server

FORCED = 333

# V2 keeps state by slot and reads how far a request is; V1 counts its own calls, which only the request itself may see.
SOURCE = """
import vllm.v1.sample.logits_processor as v1
import vllm.v1.worker.gpu.sample.logits_processor as v2

def only(logits, token):
    logits.fill_(float("-inf"))
    logits[token] = 0.0
    return logits

class BySlot(v2.LogitsProcessor):
    built = []

    def __init__(self, vllm_config, req_states):
        self.states, self.wanted = req_states, {}
        BySlot.built.append(self)

    @classmethod
    def validate_params(cls, params):
        place = (params.extra_args or {}).get("slot_force_at", 1)
        if not isinstance(place, int) or place < 1:
            raise ValueError(f"slot_force_at is {place!r}: expected a place in the answer, from 1")

    def add_request(self, slot, params):
        self.wanted.pop(slot, None)
        place = (params.extra_args or {}).get("slot_force_at")
        if place is not None:
            self.wanted[slot] = place
        return slot in self.wanted

    def remove_request(self, slot):
        self.wanted.pop(slot, None)

    def apply(self, logits, ctx):
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            written = int(self.states.total_len.gpu[slot] - self.states.prompt_len.gpu[slot])
            if self.wanted.get(slot) == written + 1:
                only(logits[row], FORCED)
        return logits

class ByRow(v1.AdapterLogitsProcessor):
    built = []

    def __init__(self, *args):
        super().__init__(*args)
        ByRow.built.append(self)

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        place = (params.extra_args or {}).get("row_force_at")
        calls = 0

        def force(output_ids, logits):
            nonlocal calls
            calls += 1
            return only(logits, FORCED) if calls == place else logits

        return force if place is not None else None

class Extension:
    def held(self):
        return [len(one.wanted) for one in BySlot.built] + [len(one.req_info) for one in ByRow.built]
""".replace("FORCED", str(FORCED))


@pytest.fixture(scope="module")
def force(tmp_path_factory):
    """BySlot comes by entry point, ByRow by flag."""
    points = {"vllm.logits_processors": {"by_slot": "force:BySlot"}}
    return make_plugin(tmp_path_factory.mktemp("force"), "force", SOURCE, points)


@pytest.fixture(scope="module")
def server(force, make_tiny_llama):
    """Room for 2560 tokens and 64 tokens a step: long prompts come in parts, and a crowd is preempted."""
    model = make_tiny_llama(max_position_embeddings=4096)
    variables = {"PYTHONPATH": force.environment()["PYTHONPATH"], "VLLM_PLUGINS": "", "VLLM_SERVER_DEV_MODE": "1"}
    flags = ["--logits-processors", "force:ByRow", "--worker-extension-cls", "force.Extension"]
    flags += ["--num-gpu-blocks-override", "161", "--max-num-batched-tokens", "64", "--max-num-seqs", "16"]
    with ServerProcess(model, *flags, "--no-enable-prefix-caching", env=variables) as running:
        yield running.wait_ready()


@pytest.fixture
def mix(server):
    """Run requests together and alone; both must say the same, and no processor may hold anything afterwards."""
    alone: dict[str, list[int]] = {}

    def run(*requests: dict, cancel: tuple[dict, ...] = ()) -> list[list[int]]:
        for request in requests:
            alone[json.dumps(request)] = tokens(server, request)
        with ThreadPoolExecutor(len(requests) + len(cancel)) as pool:
            leaving = [pool.submit(leave, server, request) for request in cancel]
            together = list(pool.map(lambda request: tokens(server, request), requests))
            for one in leaving:
                one.result()
        assert together == [alone[json.dumps(request)] for request in requests]
        assert wait_until(lambda: set(held(server)) == {0}), held(server)
        return together

    return run


def tokens(server, request: dict) -> list[int]:
    answer = server.http.post("/v1/completions", json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def leave(server, request: dict) -> None:
    """Read four events of a stream and go."""
    with server.http.stream("POST", "/v1/completions", json={**request, "stream": True}) as response:
        events = response.iter_lines()
        for _ in range(8):
            next(events)


def held(server) -> list[int]:
    return server.http.post("/collective_rpc", json={"method": "held"}).json()["results"][0]


def preemptions(server) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_preemptions_total"))


def greedy(prompt: str | list[int], length: int, **more: object) -> dict:
    sampling = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "m", "prompt": prompt, "max_tokens": length, **sampling, **more}


def forcing(slot_at: int = 0, row_at: int = 0) -> dict:
    arguments = {"slot_force_at": slot_at, "row_force_at": row_at}
    return {"vllm_xargs": {name: place for name, place in arguments.items() if place}}


def plain(number: int) -> dict:
    """One of a set of requests with different prompts and lengths."""
    return greedy([3 + number * 7 + i for i in range(5 + 9 * number)], 12 + 5 * number)


def test_both_interfaces_act_on_one_request(server, mix):
    [answer] = mix(greedy("one", 12, **forcing(slot_at=5, row_at=9)))
    assert (answer[4], answer[8]) == (FORCED, FORCED)
    assert answer.count(FORCED) == 2 or FORCED in tokens(server, greedy("one", 12))


@pytest.mark.parametrize("interface", [{"slot_at": 5}, {"row_at": 5}])
def test_one_of_eight_is_forced_and_two_leave(mix, interface):
    mine = greedy([20, 21, 22], 40, **forcing(**interface))
    crowd = [plain(number) for number in range(5)]
    leaving = (greedy([9, 9, 9], 400, **forcing(**interface)), greedy([8, 8], 400))
    answers = mix(*crowd[:2], mine, *crowd[2:], cancel=leaving)
    assert answers[2][4] == FORCED


def test_state_survives_preemption(server, mix):
    before = preemptions(server)
    # Full after 80 tokens of each: whoever gives way then has counted that far.
    crowd = [greedy([3 + number] * 240, 110, **forcing(slot_at=100, row_at=105)) for number in range(8)]
    answers = mix(*crowd)
    assert preemptions(server) > before, "the test must make requests wait for room"
    assert all((answer[99], answer[104]) == (FORCED, FORCED) for answer in answers)


def test_a_prompt_in_parts_counts_only_what_was_answered(mix):
    long = greedy([3 + i % 400 for i in range(2000)], 12, **forcing(slot_at=5, row_at=7))
    answers = mix(long, plain(1))
    assert (answers[0][4], answers[0][6]) == (FORCED, FORCED)


def test_disjoint_allowed_tokens_stay_disjoint(mix):
    some, others = list(range(100, 130)), list(range(200, 230))
    answers = mix(
        plain(0),
        greedy([5, 6], 30, allowed_token_ids=some),
        greedy([7], 12, **forcing(row_at=3)),
        greedy([5, 6], 45, allowed_token_ids=others),
    )
    assert set(answers[1]) <= set(some)
    assert set(answers[3]) <= set(others)


def test_a_request_argument_that_is_refused_is_a_400(server):
    answer = server.http.post("/v1/completions", json=greedy("one", 4, vllm_xargs={"slot_force_at": 0}))
    assert answer.status_code == 400
    assert "slot_force_at is 0: expected a place in the answer" in answer.json()["error"]["message"]
    assert server.health() == 200


def test_the_allowlist_does_not_govern_them(server):
    ledger = server.ledger()
    loads = [entry["role"] for entry in ledger if (entry["kind"], entry["name"]) == ("load", "by_slot")]
    assert loads == ["front_end", "engine_core+worker"]
    assert "VLLM_PLUGINS is empty: no plugin loads, except logits processors" in server.log()
    assert "logits processors in order: force.BySlot, force.ByRow" in server.log()


def test_what_is_no_processor_or_cannot_be_imported_stops_the_start(tiny_llama, tmp_path):
    for source, complaint in (
        ("class Bad: pass", "logits processor plugin 'bad' is the class bad.Bad, not a LogitsProcessor class"),
        ("import package_that_is_not_there", "plugin 'bad' cannot be imported from 'bad:Bad'"),
    ):
        bad = make_plugin(tmp_path / str(len(complaint)), "bad", source, {"vllm.logits_processors": {"bad": "bad:Bad"}})
        with ServerProcess(tiny_llama, env={"PYTHONPATH": bad.environment()["PYTHONPATH"]}) as server:
            assert server.exit_status() == 1
            assert f"error: {complaint}" in server.log()
            assert "bad 1.0, vllm.logits_processors: bad, in front_end" in server.log()
            assert os.listdir(server.sockets) == []
