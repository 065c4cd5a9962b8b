"""LLM from plain scripts: no `__main__` guard, nothing left behind, nothing said that nobody asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import psutil
import pytest

from process_tools import wait_until

MARK = "HARDPOINT_TEST_MARK"
PRELUDE = """
import os, sys
from hardpoint import LLM, SamplingParams

MODEL = sys.argv[1]
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
"""


def marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def script(tiny_llama, tmp_path):
    """Run a script to its end; returns its lines. Fails when it leaves a process behind."""

    def run(source, status=0, **environment):
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + source)
        mark = uuid.uuid4().hex
        env = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        env |= {"VLLM_LOGGING_LEVEL": "WARNING", "PYTHONWARNINGS": "default", **environment}
        done = subprocess.run(
            [sys.executable, str(path), str(tiny_llama)], capture_output=True, text=True, timeout=200, env=env
        )
        left = marked(mark)
        try:
            assert done.returncode == status, done.stderr
            assert wait_until(lambda: not marked(mark)), left
        finally:
            for process in left:
                process.kill()
        return done

    return run


GENERATE = """
llm = LLM(MODEL, dtype="float32")
outputs = llm.generate(["The quick", "A server", "Once"], greedy, use_tqdm=False)
print([list(output.outputs[0].token_ids) for output in outputs])
"""


def test_a_script_without_a_guard_generates_and_ends_without_a_word(script):
    done = script(GENERATE + "print('torch' in sys.modules, 'transformers' in sys.modules)")
    assert done.stdout.count("[[") == 1
    assert done.stdout.endswith("False False\n")  # Only the engine core needs them.
    assert done.stderr == ""


def test_both_ways_of_running_the_engine_core_give_the_same(script):
    apart = script(GENERATE)
    within = script(GENERATE + "import multiprocessing; print(len(multiprocessing.active_children()))",
                    VLLM_ENABLE_V1_MULTIPROCESSING="0")  # fmt: skip
    assert within.stdout.startswith(apart.stdout.strip())
    assert within.stderr == ""


def test_an_error_in_the_script_does_not_leave_the_engine_behind(script):
    done = script("llm = LLM(MODEL)\nraise RuntimeError('mine')", status=1)
    assert done.stderr.rstrip().endswith("RuntimeError: mine")


def test_several_engines_and_one_dropped_before_the_end(script):
    done = script("""
import gc
one, two = LLM(MODEL), LLM(MODEL, max_num_seqs=1)
pid = one.llm_engine.engine_core.process.child.pid
first = [o.outputs[0].text for o in one.generate(["The quick", "A"], greedy, use_tqdm=False)]
del one
gc.collect()
try:
    os.kill(pid, 0)
    print("still there")
except ProcessLookupError:
    print("gone")
print(first == [o.outputs[0].text for o in two.generate(["The quick", "A"], greedy, use_tqdm=False)])
""")
    assert done.stdout.split() == ["gone", "True"]
    assert done.stderr == ""


def test_an_engine_outlives_the_thread_it_was_built_in(script):
    done = script("""
import threading, time
built = []
thread = threading.Thread(target=lambda: built.append(LLM(MODEL)))
thread.start()
thread.join()
time.sleep(1)
print(len(built[0].generate("The", greedy, use_tqdm=False)[0].outputs[0].token_ids))
""")
    assert done.stdout.split() == ["8"]
    assert done.stderr == ""


def test_a_forked_process_neither_uses_nor_ends_the_engine(script):
    done = script(
        """
llm = LLM(MODEL)
pid = os.fork()
if pid == 0:
    try:
        llm.generate("The", greedy, use_tqdm=False)
    except Exception as error:
        print(type(error).__name__, "fork" in str(error), flush=True)
    sys.exit(0)
os.waitpid(pid, 0)
print(len(llm.generate("The", greedy, use_tqdm=False)[0].outputs[0].token_ids))
""",
        PYTHONWARNINGS="ignore::ResourceWarning",
    )  # The copy of a socket cannot be closed properly there.
    assert done.stdout.split() == ["EngineDeadError", "True", "8"]
    assert done.stderr == ""


def test_the_engine_core_finds_what_stands_beside_the_script(script, tmp_path):
    (tmp_path / "beside.py").write_text("class Extension:\n    def beside(self):\n        return 'here'\n")
    done = script("print(LLM(MODEL, worker_extension_cls='beside.Extension').collective_rpc('beside'))")
    assert done.stdout.split() == ["['here']"]


def test_an_extension_that_clashes_with_the_worker_stops_the_start(script, tmp_path):
    (tmp_path / "clash.py").write_text("class Extension:\n    def load_model(self):\n        pass\n")
    done = script("""
try:
    LLM(MODEL, worker_extension_cls="clash.Extension")
except ValueError as error:
    print(error)
""")
    assert "load_model" in done.stdout
    assert done.stderr == ""


def test_functions_reach_the_worker_only_when_allowed(script):
    source = """
llm = LLM(MODEL)
def parameters(model):
    return sum(p.numel() for p in model.parameters())
try:
    print(llm.apply_model(parameters)[0] > 100_000)
    print(llm.collective_rpc(lambda worker, add: worker.rank + add, args=(5,)))
except Exception as error:
    print(error)
"""
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION=1" in script(source).stdout
    for more in ({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
        assert script(source, **more).stdout.split() == ["True", "[5]"]


def test_what_is_wrong_with_the_arguments_is_said_before_anything_starts(script):
    done = script("""
for arguments in (dict(max_model_length=5), dict(dtype="float33"), dict(tensor_parallel_sise=2)):
    try:
        LLM(MODEL, **arguments)
    except (TypeError, ValueError) as error:
        print(type(error).__name__, error)
try:
    LLM("/no/such/model")
except Exception as error:
    print(type(error).__name__, error)
""")
    lines = done.stdout.splitlines()
    assert "max_model_len" in lines[0]
    assert "dtype" in lines[1]
    assert "tensor_parallel_size" in lines[2]
    assert "/no/such/model" in lines[3]
    assert done.stderr == ""


def test_an_error_while_the_model_loads_is_raised_as_itself(script, tiny_llama, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_llama.iterdir():
        (broken / file.name).write_bytes(
            file.read_bytes()[:-1000] if file.suffix == ".safetensors" else file.read_bytes()
        )
    done = script(f"""
from hardpoint.errors import ModelFileError
for mode in ("1", "0"):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = mode
    try:
        LLM({str(broken)!r})
    except ModelFileError as error:
        print("model.safetensors" in str(error))
""")
    assert done.stdout.split() == ["True", "True"]
    assert done.stderr == ""


def test_an_interrupted_batch_leaves_the_object_usable(script):
    done = script("""
import signal, threading, time
# Whoever started the tests in the background of a shell has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
llm = LLM(MODEL)
endless = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    llm.generate(["The"] * 8, endless, use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted", llm.llm_engine.get_num_unfinished_requests())
print(len(llm.generate(["A", "B"], greedy, use_tqdm=False)))
""")
    assert done.stdout.split() == ["interrupted", "0", "2"]


def test_the_api_of_llm(script):
    done = script("""
import numpy as np
llm = LLM(MODEL, disable_log_stats=False, seed=3)

def texts(outputs):
    return [o.outputs[0].text for o in outputs]

prompts = ["The quick", {"prompt": "A server"}, {"prompt_token_ids": [5, 6, 7]}, [8, 9]]
outputs = llm.generate(prompts, [greedy.clone() for _ in prompts])
assert [o.prompt for o in outputs] == ["The quick", "A server", None, None], [o.prompt for o in outputs]
assert [o.request_id for o in outputs] == ["0", "1", "2", "3"]
assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
assert texts(llm.generate([8, 9], greedy)) == texts(outputs[3:])
assert llm.generate([], greedy) == []
try:
    llm.generate(5, greedy)
except ValueError as error:
    assert "not int" in str(error), error
else:
    raise AssertionError("a number is no prompt")

ids = llm.enqueue(["x", "y"], greedy)
more = llm.enqueue_chat([{"role": "user", "content": "Hi"}], greedy)
done = llm.wait_for_completion()
assert [o.request_id for o in done] == ids + more
assert llm.wait_for_completion() == []
chats = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]]
one, two = llm.chat(chats, greedy)
assert one.prompt_token_ids == two.prompt_token_ids == done[2].prompt_token_ids
assert one.prompt.endswith("assistant\\n")

n = llm.generate("The", SamplingParams(n=2, temperature=1.0, max_tokens=4, logprobs=2, prompt_logprobs=1))[0]
assert [len(c.logprobs) for c in n.outputs] == [4, 4] or n.outputs[0].finish_reason == "stop"
assert len(n.prompt_logprobs) == len(n.prompt_token_ids)

stopped = llm.generate("The", SamplingParams(temperature=0, max_tokens=50, stop=[texts(outputs)[0][2:4]]))[0]
assert llm.get_default_sampling_params().temperature == 1.0
assert llm.get_world_size() == 1
assert llm.get_tokenizer().vocab_size > 256
assert llm.reset_prefix_cache() is True
assert llm.collective_rpc("get_supported_tasks") == [("generate",)]
counts = {m.name: m for m in llm.get_metrics() if hasattr(m, "value")}
assert counts["vllm:prompt_tokens"].value > 10, counts.keys()

for call, error in (
    (lambda: llm.generate("x", [greedy, greedy]), ValueError),
    (lambda: llm.generate("x", 5), TypeError),
    (lambda: llm.generate([5] * 5000, greedy), ValueError),
    (lambda: llm.embed("x"), ValueError),
    (lambda: llm.beam_search([], None), NotImplementedError),
    (lambda: llm.sleep(), NotImplementedError),
    (lambda: llm.start_profile(), ValueError),
):
    try:
        call()
    except error:
        pass
    else:
        raise AssertionError(call)
assert not llm.llm_engine.has_unfinished_requests()
assert len(llm.generate("fine", greedy)) == 1
print("ok")
""")
    assert done.stdout.split()[-1] == "ok"
    assert "Processed prompts: 100%" in done.stderr


def test_it_works_in_a_notebook_whose_event_loop_runs(tiny_llama, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    source = f"""
import asyncio
assert asyncio.get_running_loop().is_running()
from hardpoint import LLM, SamplingParams
llm = LLM({str(tiny_llama)!r})
len(llm.generate("The", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids)
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert notebook.cells[0].outputs[-1]["data"]["text/plain"] == "4"
