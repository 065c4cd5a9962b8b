import importlib.metadata
import os
import subprocess
import sys

from hardpoint.testing import make_plugin, plugin_environment

ASK = """
from importlib.metadata import entry_points, version
(point,) = entry_points(group="vllm.general_plugins", name="one")
print(point.load()(), point.dist.name, version("p-one"))
"""


def test_a_fresh_interpreter_finds_the_plugin_with_name_and_version(tmp_path):
    source = {"p_one/__init__.py": "", "p_one/inner.py": "def f(): return 'called'\n"}
    plugin = make_plugin(tmp_path, "p-one", source, {"vllm.general_plugins": {"one": "p_one.inner:f"}}, version="4.2")
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=plugin.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["called", "p-one", "4.2"]


def test_folders_come_in_order_before_the_path_there_was(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/there/before")
    one = make_plugin(tmp_path / "1", "p-one", "")
    two = make_plugin(tmp_path / "2", "p-two", "")
    environment = plugin_environment([one, two, one], EXTRA="x")
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(one.folder), str(two.folder), "/there/before"]
    assert environment["EXTRA"] == "x"


def test_metadata_is_complete(tmp_path):
    make_plugin(tmp_path, "p-one", "", {"a.b": {"x": "m:f", "y": "m:g"}, "c.d": {"z": "m"}})
    (found,) = importlib.metadata.distributions(name="p-one", path=[str(tmp_path)])
    assert found.version == "1.0"
    assert {(e.group, e.name, e.value) for e in found.entry_points} == {
        ("a.b", "x", "m:f"),
        ("a.b", "y", "m:g"),
        ("c.d", "z", "m"),
    }
