from __future__ import annotations

import pytest
import torch

from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.registry import registry
from hardpoint.testing import check_attention_backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BUILTINS["attention_backends"])
def test_built_in_backends(name, dtype):
    check_attention_backend(registry("attention_backends").load(name), dtype=dtype)
