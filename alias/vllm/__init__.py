"""Hands `import vllm` over to Hardpoint's alias: importing this package replaces it."""

import sys

from hardpoint import compat

# Tells the alias that this is not a real vLLM that was imported before it.
__hardpoint_alias__ = True

compat.install()
sys.modules.pop(__name__, None)
__import__(__name__)
