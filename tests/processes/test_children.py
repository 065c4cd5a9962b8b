"""Real child processes: start, messages, and who ends with whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from hardpoint.errors import ModelFileError, StartError
from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import ExitStatus, spawn_child
from hardpoint.links.workers import start_error, wait_for_ready
from hardpoint.types.messages import Hello, StartFailed
from process_tools import ended

CHILD = """
import os, signal, subprocess, sys, time
from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import attach
from hardpoint.links.workers import start_error, wait_for_ready
from hardpoint.types.messages import Hello, StartFailed

link = attach(sys.argv[1:])
mode = os.environ.get("CHILD_MODE", "")
if mode == "helper":
    helper = subprocess.Popen(["sleep", "300"])
link.on_parent_death(lambda: open(os.environ["CHILD_MARK"], "w").write("cleaned"))
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    link.send(Hello(pid=os.getpid(), role=os.environ.get("CHILD_ROLE", "test") + sys.path[0], index=link.index))
except ChannelClosed:
    link.end_with_parent()
if mode == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if mode == "exit":
    sys.exit(3)
while True:
    time.sleep(60)
"""


@pytest.fixture
def child_module(tmp_path, monkeypatch):
    (tmp_path / "lifecycle_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CHILD_MARK", str(tmp_path / "mark"))
    return "lifecycle_child"


def test_a_child_gets_the_environment_the_module_path_and_its_index(child_module, monkeypatch):
    monkeypatch.setenv("CHILD_ROLE", "röle ")
    monkeypatch.syspath_prepend("/made/up/path")
    child = spawn_child(child_module, "engine core", 2)
    try:
        assert child.receive(60) == Hello(pid=child.pid, role="röle /made/up/path", index=2)
        assert child.alive()
        assert os.getsid(child.pid) == child.pid  # Not in the terminal's foreground group.
    finally:
        assert child.stop(60)
    assert child.status == ExitStatus(signal=signal.SIGTERM)
    assert ended(child.pid)


@pytest.mark.parametrize(("mode", "status"), [("exit", ExitStatus(code=3)), ("crash", ExitStatus(signal=11))])
def test_the_end_of_a_child_is_reported_with_how_it_ended(child_module, monkeypatch, mode, status):
    monkeypatch.setenv("CHILD_MODE", mode)
    reported = threading.Event()
    child = spawn_child(child_module, "worker")
    child.on_exit(lambda who: reported.set() if who.status == status else None)
    assert child.receive(60).index == 0
    with pytest.raises(ChannelClosed):
        child.receive(60)
    assert reported.wait(60)
    late: list[ExitStatus | None] = []
    child.on_exit(lambda who: late.append(who.status))
    assert late == [status]
    child.stop(0)
    assert str(status) == {"exit": "ended with status 3", "crash": "was killed by SIGSEGV"}[mode]


def test_what_a_child_started_ends_with_it(child_module, monkeypatch):
    monkeypatch.setenv("CHILD_MODE", "helper")
    child = spawn_child(child_module, "worker")
    child.receive(60)
    [helper] = psutil.Process(child.pid).children()
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(60)
    assert ended(helper.pid)
    child.stop(0)


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(child_module, monkeypatch):
    monkeypatch.setenv("CHILD_MODE", "stubborn")
    child = spawn_child(child_module, "worker")
    child.receive(60)
    assert not child.stop(0.3)
    assert child.status == ExitStatus(signal=signal.SIGKILL)


PARENT = """
import os, sys, time
from hardpoint.links.children import spawn_child

child = spawn_child("lifecycle_child", "worker")
child.receive(60)
print(child.pid, flush=True)
if sys.argv[1] == "thread":
    pass
if sys.argv[1] == "fork" and os.fork() == 0:
    child.stop(5)  # Not ours in a forked process: must do nothing.
    print(child.alive(), os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def start_parent(mode: str, tmp_path) -> subprocess.Popen[str]:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    return subprocess.Popen([sys.executable, str(script), mode], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_child_and_its_helpers_end_with_the_parent_after_cleaning_up(child_module, monkeypatch, tmp_path, number):
    monkeypatch.setenv("CHILD_MODE", "helper")
    with start_parent("plain", tmp_path) as parent:
        pid = int(parent.stdout.readline())
        [helper] = psutil.Process(pid).children()
        parent.send_signal(number)
        assert ended(pid)
        assert ended(helper.pid)
    assert (tmp_path / "mark").read_text() == "cleaned"


EARLY_PARENT = """
import os, signal, sys, tempfile
from pathlib import Path
from hardpoint.links.children import spawn_child

folder = Path(tempfile.mkdtemp())
print(spawn_child("lifecycle_child", "worker", folder=folder).pid, folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_whose_parent_dies_before_it_looks_cleans_up_all_the_same(child_module):
    done = subprocess.run([sys.executable, "-c", EARLY_PARENT], capture_output=True, text=True, timeout=200)
    pid, folder = done.stdout.split()
    assert ended(int(pid))
    assert not os.path.exists(folder)


def test_a_forked_copy_of_the_parent_neither_ends_nor_keeps_the_child(child_module, tmp_path):
    with start_parent("fork", tmp_path) as parent:
        pid = int(parent.stdout.readline())
        alive, forked = parent.stdout.readline().split()
        try:
            assert alive == "True"
            time.sleep(0.2)
            assert psutil.pid_exists(pid)
            parent.kill()
            # The forked process still holds the parent's end of every pipe.
            assert ended(pid)
        finally:
            os.kill(int(forked), signal.SIGKILL)
            parent.stdout.close()


def test_a_program_that_cannot_start_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(StartError, match="worker process cannot be started"):
        spawn_child("x", "worker")


def test_a_child_that_is_never_ready_is_given_up_and_one_that_ends_is_told_apart(child_module, monkeypatch):
    for mode, what in (("", "not ready in time"), ("exit", "ended with status 3"), ("crash", "was killed by SIGSEGV")):
        monkeypatch.setenv("CHILD_MODE", mode)
        child = spawn_child(child_module, "engine core")
        child.receive(60)
        with pytest.raises(StartError, match=what):
            wait_for_ready(child, time.monotonic() + (0.1 if not mode else 60))
        child.kill()
        child.stop(5)


def test_what_stopped_a_child_is_raised_as_itself():
    message = StartFailed(
        "model-file", "the file is short", "model.gguf", "fetch it again", "Traceback ...", "ModelFileError"
    )
    error = start_error(message, "engine core")
    assert type(error) is ModelFileError
    assert (error.code, error.origin, error.fix) == ("model-file", "model.gguf", "fetch it again")
    assert error.child_traceback == "Traceback ..."
    for kind in ("KeyError", "SystemExit", "EngineDeadError.__init__", ""):
        assert type(start_error(StartFailed("c", "what", kind=kind), "worker 1")) is StartError
    assert "worker 1" in str(start_error(StartFailed("c", "what"), "worker 1"))
