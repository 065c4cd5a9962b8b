from __future__ import annotations

from collections.abc import Callable

import pytest
from paged_model import PagedModel


@pytest.fixture
def paged_model() -> Callable[..., PagedModel]:
    return PagedModel
