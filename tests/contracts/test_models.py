from __future__ import annotations

import pytest

from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.registry import registry
from hardpoint.testing import check_model


@pytest.mark.parametrize("name", BUILTINS["models"])
def test_built_in_models(name):
    check_model(registry("models").load(name))
