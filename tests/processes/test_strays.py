from __future__ import annotations

import subprocess
import sys

import psutil

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
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=60)
    before, plain, daemon = map(int, done.stdout.split()[:3])
    try:
        assert done.stdout.split()[3] == "2", done.stderr
        assert ended(plain)
        assert ended(daemon)
        assert running(before)
    finally:
        psutil.Process(before).kill()
