"""`hardpoint models`."""

from __future__ import annotations

import pytest

from hardpoint.cli.main import main
from hardpoint.config import catalogue


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARDPOINT_CACHE", str(tmp_path))


def test_list_tells_what_is_here(tmp_path, capsys):
    assert main(["models", "list"]) == 0
    assert capsys.readouterr().out.count("not fetched") == 2
    place = catalogue._home(catalogue.CATALOGUE[1]) / "model"
    place.mkdir(parents=True)
    main(["models", "list"])
    assert capsys.readouterr().out.count("not fetched") == 1
    assert main(["models", "path", "all-minilm-l6-v2"]) == 0
    assert capsys.readouterr().out.strip() == str(place)


def test_path_of_what_was_not_fetched_says_how_to(capsys):
    assert main(["models", "path"]) == 1
    assert "fix: hardpoint models pull smollm2-135m-instruct" in capsys.readouterr().err


def test_pull_prints_the_place_alone(tmp_path, monkeypatch, capsys):
    def pull(model, report):
        report("fetching")
        return tmp_path / model.name

    monkeypatch.setattr(catalogue, "pull", pull)
    assert main(["models", "pull", "SmolLM2-135M-Instruct"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path}/smollm2-135m-instruct\n"
    assert captured.err == "fetching\n"


def test_unknown_name_and_no_subcommand(capsys):
    assert main(["models", "pull", "smolm2-135m-instruct"]) == 2
    assert "did you mean smollm2-135m-instruct?" in capsys.readouterr().err
    assert main(["models"]) == 2
