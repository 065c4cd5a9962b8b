"""Methods that tests mix into a worker and call from outside."""

from __future__ import annotations

import time

import numpy as np


class Odd(Exception):
    """Cannot be made again from its text alone."""

    def __init__(self, one, two):
        super().__init__(f"odd {one} {two}")


class Extension:
    def ok(self, value=1):
        return {"rank": self.rank, "value": value, "model": type(self.get_model()).__name__}

    def boom(self):
        raise Odd("one", "two")

    def slow(self):
        time.sleep(60)

    def big(self):
        return np.ones(50_000_000, np.uint8)

    def weird(self):
        return lambda: 1

    def die(self):
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)


class Clash:
    def load_model(self):
        return None
