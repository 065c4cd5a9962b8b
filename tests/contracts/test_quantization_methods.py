from __future__ import annotations

import pytest

from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.registry import registry
from hardpoint.testing import check_quantization_config


@pytest.mark.parametrize("name", BUILTINS["quantization_methods"])
def test_built_in_methods(name):
    check_quantization_config(registry("quantization_methods").load(name), close=1e-6)
