"""What a signal interrupts, and what it lets end first."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest

from hardpoint.processes.stopping import StopRequested, StopSignals

# A function that says where it is by its module, as code of that module does.
SOURCE = """
def work(begin, wait_s):
    begin()
    end = clock() + wait_s
    while clock() < end:
        pass
    done.append(True)
"""


def function_of(module):
    done = []
    space = {"__name__": module, "clock": time.monotonic, "done": done}
    exec(SOURCE, space)
    return space["work"], done


def send(number):
    # No function of this module's: its code would be what is interrupted.
    return partial(os.kill, os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_plugins_code_is_interrupted_at_once(number):
    work, done = function_of("acme.plugin")
    with StopSignals() as signals, pytest.raises(StopRequested):
        work(send(number), 30)
    assert not done
    assert signals.requested == signal.Signals(number).name


@pytest.mark.parametrize("module", ["importlib._bootstrap", "importlib._bootstrap_external", "logging", "weakref"])
def test_what_holds_locks_ends_before_the_stop(module):
    work, done = function_of(module)

    def go_on():
        # Many of the times at which it is sent again lie in the first.
        work(send(signal.SIGTERM), 0.05)
        time.sleep(30)

    with StopSignals() as signals, pytest.raises(StopRequested):
        go_on()
    assert done
    assert signals.requested == "SIGTERM"


def test_a_listener_is_called_wherever_the_signal_comes():
    work, done = function_of("importlib._bootstrap")
    heard = []
    with StopSignals() as signals:
        signals.listen_with(lambda: heard.append(True))
        work(send(signal.SIGTERM), 0.01)
        assert heard == [True]
    assert done
