"""How many API servers the flags ask for."""

from __future__ import annotations

from argparse import Namespace

import pytest

from hardpoint.errors import ConfigError
from hardpoint.processes.front_end import api_servers


@pytest.mark.parametrize(("given", "count"), [(None, 1), (1, 1), (3, 3)])
def test_one_unless_told_otherwise(given, count):
    assert api_servers(Namespace(api_server_count=given, data_parallel_size_local=None)) == count


@pytest.mark.parametrize(("given", "local", "text"), [(0, None, "at least one"), (2, 0, "one front end in at a time")])
def test_numbers_that_cannot_be_are_refused(given, local, text):
    with pytest.raises(ConfigError, match=text):
        api_servers(Namespace(api_server_count=given, data_parallel_size_local=local))
