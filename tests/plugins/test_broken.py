"""One broken general plugin between two good ones: what each command of a user does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hardpoint.testing import Plugin, make_plugin, plugin_environment

GOOD = "def register(): pass\n"
BAD = {
    "import": "import package_that_is_not_there\n",
    "attribute": "x = 1\n",
    "raises": """
from hardpoint.extensions.registry import registry
def register():
    registry("models").register("Half", "a:B")
    raise ValueError("boom")
""",
    "exits": "import sys\ndef register(): sys.exit(3)\n",
    "class": "class register: pass\n",
}
STOPS = {"raises", "exits"}


def plugins(folder, kind: str) -> list[Plugin]:
    sources = {"a_ok": GOOD, "b_bad": BAD[kind], "c_ok": GOOD}
    return [
        make_plugin(folder / name, name.replace("_", "-"), source, {"vllm.general_plugins": {name: f"{name}:register"}})
        for name, source in sources.items()
    ]


def command(folder, kind: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = plugin_environment(plugins(folder, kind), VLLM_TARGET_DEVICE="cpu", **variables)
    line = [sys.executable, "-m", "hardpoint", *words]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.parametrize("kind", BAD)
def test_a_start_goes_as_the_fault_rule_says_and_names_the_plugin(tmp_path, kind):
    done = command(tmp_path, kind, "serve", str(tmp_path / "no-model"))
    assert done.returncode != 0
    said = done.stdout + done.stderr
    if kind in STOPS:
        assert "error: plugin 'b_bad' failed" in done.stderr
        assert "b-bad 1.0, vllm.general_plugins: b_bad, in front_end" in done.stderr
        assert "no-model" not in done.stderr, "it stops before the model is looked for"
        assert "Traceback" not in done.stderr
    else:
        assert "no-model" in done.stderr, "the other plugins load and the start goes on"
        assert ("'b_bad' cannot be imported" in said) == (kind != "class")


@pytest.mark.parametrize("kind", sorted(STOPS))
def test_the_allowlist_and_the_deny_list_keep_it_out(tmp_path, kind):
    for variables in ({"VLLM_PLUGINS": "a_ok,c_ok"}, {"HARDPOINT_PLUGINS_DENY": "b_bad"}):
        done = command(tmp_path, kind, "serve", str(tmp_path / "no-model"), **variables)
        assert "no-model" in done.stderr
        assert "failed" not in done.stderr


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["serve", "--help"], ["models", "list"], ["plugins", "list"]]
)
def test_what_a_user_needs_to_mend_it_works(tmp_path, kind, words):
    done = command(tmp_path, kind, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    if words == ["serve", "--help"]:
        assert "--max-model-len" in done.stdout
        assert "b_bad" in done.stdout + done.stderr
    elif words != ["plugins", "list"]:
        assert "b_bad" not in done.stdout + done.stderr
