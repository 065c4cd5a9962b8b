"""How a child process ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, logging, sys, threading, time
from hardpoint.processes.child import end_process

class Slow:
    def __del__(self):
        sys.stderr.write("taken apart ")

kept = [Slow()]
kept.append(kept)
atexit.register(lambda: print("atexit", end=" "))
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", end=" "))).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("main", end=" ")
end_process(7)
"""


def test_a_process_ends_with_its_threads_and_what_waits_for_the_end_but_is_not_taken_apart():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (7, "main thread atexit ", "")


def test_a_process_whose_terminal_is_gone_ends_with_its_status():
    program = PROGRAM.replace('print("main", end=" ")', "sys.stdout = sys.stderr = None")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 7
