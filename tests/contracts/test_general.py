"""Our own entry points in the group go through the suite's checks of a general plugin."""

from __future__ import annotations

import pytest

from hardpoint.extensions.builtins import BUILTIN_ENTRY_POINTS
from hardpoint.extensions.refs import load_ref
from hardpoint.testing.failures import require_call, require_sync


@pytest.mark.parametrize("ref", BUILTIN_ENTRY_POINTS["vllm.general_plugins"].values())
def test_a_built_in_entry_point_is_a_function_without_arguments(ref):
    function = load_ref(ref)
    require_call(function, ref, "a function without arguments")
    require_sync(function, ref, "__call__")
    assert function() is None, "nothing is configured, so nothing happens"
