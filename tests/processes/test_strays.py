from __future__ import annotations

import contextlib
import subprocess
import sys

import psutil
import pytest

from process_tools import ended, running

SERVER = """
import os, subprocess, sys, time
from hardpoint.links.strays import end_strays, mark_run

sleep = dict(args=["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
before = subprocess.Popen(**sleep)
mark_run()
plain = subprocess.Popen(**sleep)
# A helper that detaches itself and ignores polite requests.
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"
daemon = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
daemon.stdout.readline()
print(before.pid, plain.pid, daemon.pid, flush=True)
print(end_strays(), flush=True)
"""


def test_every_process_started_after_the_mark_is_ended_and_no_other():
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=200)
    before, plain, daemon = map(int, done.stdout.split()[:3])
    try:
        assert done.stdout.split()[3] == "2", done.stderr
        assert ended(plain)
        assert ended(daemon)
        assert running(before)
    finally:
        psutil.Process(before).kill()


ROOT = """
import subprocess, sys, time
from hardpoint.links.strays import mark_run

mark_run()
stray = subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL)
child = "import sys; from hardpoint.links.strays import end_orphaned_strays; "
child += "sys.stdin.readline(); print(end_orphaned_strays(), flush=True)"
child = subprocess.Popen([sys.executable, "-c", child], stdin=0, start_new_session=True)
print(stray.pid, child.pid, flush=True)
child.wait()
time.sleep(300)
"""


@pytest.mark.parametrize(("root_dies", "count"), [(True, "1"), (False, "0")])
def test_a_child_whose_parent_died_ends_strays_only_where_the_server_has_died_too(root_dies, count):
    root = subprocess.Popen([sys.executable, "-c", ROOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stray, child = map(int, root.stdout.readline().split())
    try:
        if root_dies:
            root.kill()  # And not waited for: it stays as a zombie.
        root.stdin.write("go\n")
        root.stdin.flush()
        assert root.stdout.readline().strip() == count
        assert ended(child)
        assert running(stray) is not root_dies
    finally:
        for pid in (stray, child):
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        root.kill()
        root.communicate()
