"""The alias table against reality: every target exists, and every name plugins import is answered or explained."""

import importlib
import json
from pathlib import Path

import pytest

from hardpoint import compat
from hardpoint.compat.rows import Entry, Waits
from hardpoint.compat.table import MODULES
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.registry import isolated, registry

# Module paths and names that plugin authors import from vLLM; "a|b" is a name of either module.
SURFACE = json.loads((Path(__file__).parent / "surface.json").read_text())
ROWS = {module: row for module, row in MODULES.items() if isinstance(row, Entry)}


@pytest.fixture(autouse=True)
def alias():
    """Answer `import vllm` during a test."""
    assert compat.install()
    yield
    compat.uninstall()


@pytest.mark.parametrize("module", ROWS)
def test_targets_exist(module):
    row = ROWS[module]
    for home in row.home.split():
        importlib.import_module(home)
    for name, target in row.names.items():
        owner, _, attribute = target.partition(":")
        assert hasattr(importlib.import_module(owner), attribute), f"{module}.{name} points at {target}"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports_or_says_what_it_waits_for(module):
    row = MODULES[module]
    if isinstance(row, Waits):
        with pytest.raises(ImportError, match=f"waits for {row.what}"):
            importlib.import_module(module)
        return
    imported = importlib.import_module(module)
    for name, what in row.waits.items():
        with pytest.raises(AttributeError, match=f"waits for {what}"):
            getattr(imported, name)


@pytest.mark.parametrize("modules", SURFACE)
def test_names_that_plugins_import(modules):
    unexplained = []
    for name in SURFACE[modules]:
        problems = []
        for module in modules.split("|"):
            try:
                getattr(importlib.import_module(module), name)
                break
            except (ImportError, AttributeError) as problem:
                problems.append(str(problem))
        else:
            if not any("waits for" in problem for problem in problems):
                unexplained.append(f"{name}: {problems}")
    assert not unexplained


def test_a_parent_of_every_module_is_a_module():
    for module in ROWS:
        parent = module.rpartition(".")[0]
        assert not parent or parent in ROWS, f"{module} cannot be imported: {parent} has no row"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vllm.attention.layer:Attention", "vllm.model_executor.layers.attention:Attention"),
        ("vllm.platforms:_Backend", "vllm.v1.attention.backends.registry:AttentionBackendEnum"),
        ("vllm.sequence:Logprob", "vllm.logprobs:Logprob"),
        ("vllm.transformers_utils.tokenizer:AnyTokenizer", "vllm.tokenizers:TokenizerLike"),
        ("vllm.utils:direct_register_custom_op", "vllm.utils.torch_utils:direct_register_custom_op"),
        ("vllm.v1.engine.processor:Processor", "vllm.v1.engine.input_processor:InputProcessor"),
        ("vllm.worker.worker_base:WorkerBase", "vllm.v1.worker.worker_base:WorkerBase"),
        ("vllm.executor.executor_base:ExecutorBase", "vllm.v1.executor:Executor"),
        ("vllm.entrypoints.openai.protocol:ChatCompletionRequest",
         "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"),
    ],
)  # fmt: skip
def test_an_old_path_gives_the_same_object(old, new):
    assert load_ref(old) is load_ref(new)


def test_what_is_written_to_or_popped_from_a_registrys_dict_reaches_it():
    from vllm import ModelRegistry
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm

    class Written(RMSNorm): ...

    with isolated():
        ModelRegistry.models["WrittenForCausalLM"] = "some_plugin.model:Written"
        op_registry_oot["RMSNorm"] = Written
        assert registry("models").entry("WrittenForCausalLM").ref == "some_plugin.model:Written"
        assert registry("oot_ops").load("RMSNorm") is Written
        for arch in ("LlamaForCausalLM", "WrittenForCausalLM"):
            ModelRegistry.models.pop(arch)
        op_registry_oot.pop("RMSNorm")
        assert not {"LlamaForCausalLM", "WrittenForCausalLM"} & set(registry("models").names())
        assert "RMSNorm" not in registry("oot_ops")
    assert "LlamaForCausalLM" in registry("models")
