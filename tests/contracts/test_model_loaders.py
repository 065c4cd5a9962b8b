from __future__ import annotations

import pytest

from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.registry import registry
from hardpoint.testing import check_model_loader


@pytest.mark.parametrize("name", [name for name in BUILTINS["model_loaders"] if name != "gguf"])
def test_built_in_loaders(name):
    check_model_loader(registry("model_loaders").load(name))


def test_gguf(smollm2_gguf):
    check_model_loader(registry("model_loaders").load("gguf"), smollm2_gguf)
