import json
import sys

from hardpoint.extensions.listing import table_as_dict
from hardpoint.extensions.points import ROWS


def test_every_row_is_listed_and_nothing_is_imported(install, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "one,typo")
    install("one", "1/0", {"vllm.general_plugins": {"one": "p_one:f"}, "vllm.endpoint_plugins": {"two": "p_one:f"}})
    table = json.loads(json.dumps(table_as_dict()))
    rows = [row for kind in ("groups", "registries", "config_hooks", "platform_hooks") for row in table[kind]]
    assert [row["key"] for row in rows] == [row.key for row in ROWS]
    assert "p_one" not in sys.modules
    entries = {e["name"]: e for group in table["groups"] for e in group["entries"]}
    assert entries["one"]["loads"]
    assert entries["one"]["version"] == "1.0"
    assert entries["two"]["why_not"] == "not named in VLLM_PLUGINS"
    assert entries["lora_filesystem_resolver"]["built_in"]
    assert "'typo'" in table["remarks"][0]
    models = next(row for row in table["registries"] if row["key"] == "models")
    assert {
        "name": "LlamaForCausalLM",
        "target": "hardpoint.worker.models.llama:LlamaForCausalLM",
        "origin": "built in",
    } in models["entries"]
