"""docs/seams.md, row by row: a general plugin patches each seam through `import vllm...` and the patch is reached."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from hardpoint.testing import make_plugin
from process_tools import wait_until
from server_process import ServerProcess

pytestmark = pytest.mark.server

PAGE = Path(__file__).parents[2] / "docs" / "seams.md"
ROW = re.compile(r"^\| `(vllm\.[\w.]+)` \| ([a-z ,]+) \|", re.MULTILINE)
_, PATCHES, CLASSES = re.split(r"\n## (?=Configuration|Whole classes)", PAGE.read_text(encoding="utf-8"))
SEAMS = {path: roles.split(", ") for path, roles in ROW.findall(PATCHES)}
REPLACED = {path: roles.split(", ") for path, roles in ROW.findall(CLASSES)}
ROLES = ("front end", "engine core", "worker")

# Wraps whatever SEAMS lists and notes each first call, with the role of the process.
OBSERVER = """
import functools, importlib, json, os
from hardpoint.extensions.ledger import ledger

seen = set()

def note(path):
    if (os.getpid(), path) not in seen:
        seen.add((os.getpid(), path))
        with open(os.environ["MARKS"], "a") as file:
            print(json.dumps([path, ledger.role]), file=file, flush=True)

def find(path):
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]

def wrap(path):
    owner, name = find(path)
    original = next((vars(c)[name] for c in getattr(owner, "__mro__", ()) if name in vars(c)), None)
    is_class_method = isinstance(original, classmethod)
    function = original.__func__ if is_class_method else getattr(owner, name)

    @functools.wraps(function)
    def patched(*args, **kwargs):
        note(path)
        return function(*args, **kwargs)

    setattr(owner, name, classmethod(patched) if is_class_method else patched)

def register():
    for path in json.loads(os.environ["SEAMS"]):
        wrap(path)
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    """Make a general plugin from source; returns the variables that let a server find it."""

    def make(name: str, source: str, **variables: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp(name)
        plugin = make_plugin(folder, name, source, {"vllm.general_plugins": {name: f"{name}:register"}})
        return {"PYTHONPATH": plugin.environment()["PYTHONPATH"], **variables}

    return make


@pytest.fixture(scope="module")
def reached(plugins, tiny_llama, tmp_path_factory):
    """Seam -> roles of the processes where its patch was called, on a server whose worker is a process of its own."""
    marks = tmp_path_factory.mktemp("marks") / "marks"
    variables = plugins(
        "observer", OBSERVER, SEAMS=json.dumps(list(SEAMS)), MARKS=str(marks), VLLM_LOG_STATS_INTERVAL="0.2"
    )
    with ServerProcess(tiny_llama, "--distributed-executor-backend", "mp", env=variables) as server:
        server.wait_ready()
        assert server.complete(max_tokens=4).status_code == 200
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
        events = server.stream()
        next(events)
        events.close()
        assert wait_until(lambda: "EngineCore.abort_requests" in marks.read_text())
        assert wait_until(lambda: "LoggingStatLogger.log" in marks.read_text())
        log = server.log()
    assert "Traceback" not in log, log
    return marks_in(marks)


def marks_in(file: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in file.read_text().splitlines():
        path, role = json.loads(line)
        found.setdefault(path, []).append(role.replace("_", " "))
    return found


def test_the_page_has_rows():
    assert len(SEAMS) > 50
    assert all(role in ROLES for roles in [*SEAMS.values(), *REPLACED.values()] for role in roles)


@pytest.mark.parametrize("path", SEAMS)
def test_a_patched_seam_is_called_where_the_page_says(reached, path):
    assert reached.get(path, []) == SEAMS[path]


EFFECTS = """
import os

def register():
    from vllm.config import VllmConfig
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.sample.sampler import Sampler

    check, generate, process = VllmConfig.__post_init__, AsyncLLM.generate, OutputProcessor.process_outputs
    schedule, choose, build = Scheduler.schedule, Sampler.forward, LlamaForCausalLM.__init__

    def with_room_for_three(self):
        self.scheduler_config.max_num_seqs = 3
        check(self)

    async def marked(self, prompt, params, request_id, **more):
        async for output in generate(self, prompt, params, request_id, **more):
            output.outputs[0].text = "<" + output.outputs[0].text + ">"
            yield output

    def at_most_five_tokens(self, outputs, *more, **named):
        for output in outputs:
            assert output.new_token_ids in ([7], []), output.new_token_ids
        return process(self, outputs, *more, **named)

    def in_small_steps(self, *args, **named):
        self.max_num_scheduled_tokens = 4
        plan = schedule(self, *args, **named)
        assert plan.total_num_scheduled_tokens <= 4
        return plan

    def always_seven(self, logits, metadata):
        output = choose(self, logits, metadata)
        output.sampled_token_ids.fill_(7)
        return output

    def built(self, *args, **named):
        build(self, *args, **named)
        self.seen_by_plugin = True

    VllmConfig.__post_init__, AsyncLLM.generate, OutputProcessor.process_outputs = (
        with_room_for_three, marked, at_most_five_tokens)
    Scheduler.schedule, Sampler.forward, LlamaForCausalLM.__init__ = in_small_steps, always_seven, built
"""

INSTEAD = """
import json, os
from hardpoint.extensions.ledger import ledger

def note(path):
    with open(os.environ["MARKS"], "a") as file:
        print(json.dumps([path, ledger.role]), file=file, flush=True)

def register():
    import importlib
    for path in json.loads(os.environ["SEAMS"]):
        module = importlib.import_module(path.rpartition(".")[0])
        name = path.rpartition(".")[2]
        setattr(module, name, derived(getattr(module, name), path))

def derived(base, path):
    class Mine(base):
        def __init__(self, *args, **kwargs):
            note(path)
            super().__init__(*args, **kwargs)
    Mine.__name__ = Mine.__qualname__ = base.__name__
    return Mine
"""


@pytest.fixture(scope="module")
def changed(plugins, tiny_llama, tmp_path_factory):
    """A server under both plugins, its first answer, and the classes of theirs that were built: path -> roles."""
    marks = tmp_path_factory.mktemp("changed") / "marks"
    one = plugins("instead", INSTEAD, SEAMS=json.dumps(list(REPLACED)), MARKS=str(marks))
    other = plugins("effects", EFFECTS)
    variables = {**one, "PYTHONPATH": os.pathsep.join([one["PYTHONPATH"], other["PYTHONPATH"]])}
    with ServerProcess(tiny_llama, "--distributed-executor-backend", "mp", env=variables) as server:
        server.wait_ready()
        answer = server.complete("one two three four five six", max_tokens=3, return_token_ids=True).json()
        yield server, answer, marks_in(marks)


def test_patches_change_what_they_touch(changed):
    server, answer, _ = changed
    [choice] = answer["choices"]
    assert choice["token_ids"] == [7, 7, 7]
    assert (choice["text"][0], choice["text"][-1]) == ("<", ">")
    writes = [
        (entry["role"], entry["origin"]["distribution"], entry["detail"])
        for entry in server.http.get("/plugins").json()["ledger"]
        if (entry["kind"], entry["name"]) == ("config_write", "scheduler_config.max_num_seqs")
    ]
    assert writes == [("front_end", "effects", "128 -> 3 before the steps")], "the second run finds it done"


@pytest.mark.parametrize("path", REPLACED)
def test_a_class_in_the_place_of_ours_is_built(changed, path):
    assert changed[2].get(path) == REPLACED[path]
