"""Published plugins that wait for a part which is not there yet.

Each really tries: it imports what the plugin registers, and uses it. The test is expected to fail, for the part it
waits for and for nothing else, so that it turns red when the part lands and the check here becomes a real one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from downstream_packages import NEEDS, folder_of

from hardpoint.compat.rows import CONNECTORS, MAMBA


class StillMissing(AssertionError):
    """The plugin failed for want of the part it waits for."""


def waits_for(*parts: str) -> pytest.MarkDecorator:
    """Expect StillMissing, and nothing else."""
    return pytest.mark.xfail(raises=StillMissing, strict=True, reason=f"waits for {', '.join(parts)}")


# What a process of ours does for general plugins, without the rules for faults.
REGISTER = """
import importlib.metadata, sys
from hardpoint import compat
assert compat.install()
def register(distribution, *names):
    for point in importlib.metadata.distribution(distribution).entry_points:
        if point.group == "vllm.general_plugins" and (not names or point.name in names):
            point.load()()
"""


def run(plugin: str, source: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run source in a fresh interpreter that has the alias and the plugin."""
    return subprocess.run(
        [sys.executable, "-c", REGISTER + source, *map(str, arguments)],
        env={"PYTHONPATH": str(folder_of(plugin)), "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": ""},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip


def attempt(plugin: str, source: str, *parts: str, arguments: tuple[object, ...] = ()) -> None:
    """Run source; StillMissing when it fails because it waits for one of `parts`."""
    done = run(plugin, source, *arguments)
    if done.returncode == 0:
        return
    if any(f"waits for {part}" in done.stderr for part in parts):
        raise StillMissing(done.stderr.strip().splitlines()[-1])
    pytest.fail(f"{plugin} fails for another reason than {parts}: {done.stderr}", pytrace=False)


def model_folder(tiny_llama: Path, folder: Path, **config: object) -> Path:
    """A model without weights: a config and the tiny model's tokenizer."""
    for file in tiny_llama.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32", "vocab_size": 448, **config}))
    return folder


GENERATE = """
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", max_model_len=64)
[answer] = llm.generate(["The quick"], SamplingParams(max_tokens=8, ignore_eos=True, temperature=0))
assert len(answer.outputs[0].token_ids) == 8
"""
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip


KVBLOCKD = """
import vllm_kvblockd
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
assert issubclass(vllm_kvblockd.KvblockdConnector, KVConnectorBase_V1)
transfer = {"kv_connector": "KvblockdConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "vllm_kvblockd.connector"}
config = EngineArgs(model=sys.argv[1], kv_transfer_config=transfer).create_engine_config()
assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is vllm_kvblockd.KvblockdConnector
"""


@waits_for(CONNECTORS)
def test_kvblockd_is_chosen_as_the_connector(tiny_llama):
    attempt("vllm-kvblockd==0.1.0", KVBLOCKD, CONNECTORS, arguments=(tiny_llama,))


QWERKY = """
register("qwerky-vllm-models")
import vllm.model_executor.layers.mamba.abstract
"""


@waits_for(MAMBA)
def test_qwerky_runs_a_llama_with_state_space_layers(tiny_llama, tmp_path):
    layers = {"attn_layers": [1], "d_model": 64, "d_inner": 64, "d_xb": 32, "ssm_cfg": {"expand": 1}}
    config = {"architectures": ["MambaInLlamaMambaForCausalLM"], "model_type": "mambainllama_mamba", **SIZES, **layers}
    folder = model_folder(tiny_llama, tmp_path, **config)
    attempt("qwerky-vllm-models==0.2.71", QWERKY + GENERATE, MAMBA, arguments=(folder,))


@waits_for("the Hunyuan model that its speech model is built on")
def test_simulst_registers_its_speech_model():
    done = run("simulst==0.1.0", 'register("simulst")\n')
    if "does not provide HYV3ForCausalLM" in done.stderr:
        raise StillMissing(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr


def test_the_page_says_which_run_and_which_wait():
    here = Path(__file__)
    page = (here.parents[2] / "docs" / "compatibility.md").read_text()
    rows, waiting = page.partition("## Published plugins")[2].split("Others wait")
    files = {file: set(re.findall(r'"([\w.-]+==[\w.]+)', file.read_text())) for file in here.parent.glob("test_*.py")}
    used = set().union(*(names for file, names in files.items() if file != here))
    assert {name for name in NEEDS if f"| {name.replace('==', ' ')} |" in rows} == used
    assert {name for name in NEEDS if name.partition("==")[0] in waiting} == files[here]
