"""What models with adapters compute, held against PEFT: each kind of layer, mixed batches, two ranks, GGUF bases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_ggufs
import torch
from adapted_model import TOKENS, logits, manager_of
from paged_model import PagedModel

from hardpoint.testing.tiny_llama import write_tiny_llama
from hardpoint.worker.lora.methods import AdaptedMethod
from lora_adapters import KINDS, load_base, logits_of, with_adapter, write_adapter
from server_process import free_port

NAMES = ["none", *KINDS]
HELPERS = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", params=["", "tied"])
def reference(request, tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with the model `m` and an adapter of each kind, and the logits of PEFT for each."""
    folder = tmp_path_factory.mktemp("peft")
    write_tiny_llama(folder / "m", tie_word_embeddings=bool(request.param))
    expected = {"none": logits_of(load_base(folder / "m"), TOKENS)}
    for seed, (name, settings) in enumerate(KINDS.items()):
        expected[name] = logits_of(with_adapter(folder / "m", folder / name, settings, seed), TOKENS)
    return folder, expected


def test_every_kind_of_layer_alone_and_mixed(reference):
    folder, expected = reference
    model = PagedModel(folder / "m")
    manager = manager_of(model, folder)
    assert manager.ids() == {1, 2, 3}
    for batch in ([0], [1], [2], [3], [0, 1, 2, 3, 1, 0], [3, 3]):
        for number, found in zip(batch, logits(model, manager, batch), strict=True):
            torch.testing.assert_close(found, expected[NAMES[number]], atol=1e-4, rtol=1e-4)
    assert manager.remove(2)
    assert not manager.remove(2)
    torch.testing.assert_close(logits(model, manager, [2])[0], expected["none"], atol=1e-4, rtol=1e-4)


def test_adapters_change_what_is_computed(reference):
    _, expected = reference
    for name in KINDS:
        assert (expected[name] - expected["none"]).abs().max() > 0.1


def test_lora_dtype_is_that_of_the_adapters(tiny_llama, tmp_path):
    write_adapter(tiny_llama, tmp_path / "a")
    model = PagedModel(tiny_llama)
    manager = manager_of(model, tmp_path, ["a"], lora_dtype="bfloat16")
    halves = {
        half.dtype
        for _, method in manager._methods.values()
        for updates in method.updates.values()
        for one in updates.get(1, ())
        for half in (one.first, one.second)
    }
    assert halves == {torch.bfloat16}
    found = logits(model, manager, [1])[0]
    other = PagedModel(tiny_llama)
    wanted = logits(other, manager_of(other, tmp_path, ["a"]), [1])[0]
    assert found.dtype == torch.float32
    assert 0 < (found - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize(("stored", "tolerance"), [("F32", 2e-3), ("Q8_0", 0.05)])
def test_a_gguf_base_computes_in_the_kernels_and_its_adapters_are_added(stored, tolerance, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    base = LlamaForCausalLM(config).eval()
    base.save_pretrained(tmp_path / "m")
    tiny_ggufs.write(base, "llama", tmp_path / "m.gguf", stored)
    expected = {"none": logits_of(base, TOKENS)}
    for name in KINDS:
        expected[name] = logits_of(with_adapter(tmp_path / "m", tmp_path / name, KINDS[name], 1), TOKENS)
    names = ["attention", "every"]
    model = PagedModel(tmp_path / "m.gguf", dtype="auto")
    layer = model.model.model.layers[0].self_attn.qkv_proj
    before = type(layer.quant_method).__name__
    manager = manager_of(model, tmp_path, names)
    assert before == "PackedLinearMethod"
    assert isinstance(layer.quant_method, AdaptedMethod)
    for number, found in enumerate(logits(model, manager, [0, 1, 2])):
        wanted = expected[["none", *names][number]]
        assert (found - wanted).norm() < tolerance * wanted.norm()
    with manager.set_aside():
        assert type(layer.quant_method).__name__ == before


@pytest.mark.parametrize("reference", [""], indirect=True)
def test_two_ranks_share_the_work(reference):
    folder, expected = reference
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HELPERS), str(HELPERS.parent.parent), str(HELPERS / "lora")])
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as written:
            command = [sys.executable, str(HELPERS / "lora" / "adapters_on_two_ranks.py"), str(rank), port, str(folder)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=written, stderr=written))
    try:
        ended = [rank.wait(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ended == [0, 0], "\n".join(log.read_text() for log in logs)
    for split in ("tensor", "pipeline"):
        found = torch.load(folder / f"{split}.pt", weights_only=True)
        for name, one in zip(NAMES, found, strict=True):
            torch.testing.assert_close(one, expected[name], atol=1e-4, rtol=1e-4)
    halves = json.loads((folder / "halves.json").read_text())
    # The output of k, and the input of down, are cut in two; the other half of the pair is whole on both ranks.
    assert halves == {"qkv_proj": [[8, 64], [16, 8]], "down_proj": [[8, 80], [64, 8]]}
