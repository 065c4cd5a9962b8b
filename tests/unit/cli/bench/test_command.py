"""`hardpoint bench`: which measurement, and what of vLLM's command is refused by name."""

from __future__ import annotations

import pytest

from hardpoint.cli.bench.command import MEASUREMENTS
from hardpoint.cli.main import main
from hardpoint.extensions.refs import load_ref


@pytest.mark.parametrize("one", MEASUREMENTS, ids=lambda one: one.name)
def test_each_measurement_has_a_help(one, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["bench", one.name, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: hardpoint bench {one.name}")
    # What is refused is not offered.
    assert not [flag for flag in load_ref(f"{one.module}:REFUSED") if f"  {flag} " in out]


@pytest.mark.parametrize("one", MEASUREMENTS, ids=lambda one: one.name)
def test_what_is_refused_is_refused_by_name(one, capsys):
    for flag in load_ref(f"{one.module}:REFUSED"):
        assert main(["bench", one.name, flag, "x"]) == 2
        assert f"`hardpoint bench {one.name}` does not have {flag}: " in capsys.readouterr().err


def test_a_measurement_is_needed(capsys):
    assert main(["bench"]) == 2
    assert "required: measurement" in capsys.readouterr().err
    assert main(["bench", "serv"]) == 2
    assert "there is no measurement 'serv'; did you mean serve?" in capsys.readouterr().err
