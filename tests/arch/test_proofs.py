"""Every row that is built names a test that starts processes; the page of extension points shows it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hardpoint.extensions.points import ROWS
from hardpoint.extensions.rows import State

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import proofs  # noqa: E402 - found by the path above

# Where the tests are that start processes.
FOLDERS = ("plugins", "processes", "openai", "tour", "downstream")


@pytest.mark.parametrize("row", [row for row in ROWS if row.state is State.BUILT], ids=lambda row: row.key)
def test_a_built_row_is_shown_at_work_in_real_processes(row):
    path = Path(proofs.proof(row))
    assert (ROOT / path).is_file()
    assert path.parts[1] in FOLDERS


def test_proofs_are_of_rows_there_are():
    assert set(proofs.PROOFS) <= {row.key for row in ROWS}
    assert (ROOT / proofs.REFUSAL).is_file()
