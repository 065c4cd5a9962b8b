"""The files that are measured, made once: the default model's, two other types of it, and three of a second shape.

python bench/peers/models.py [--folder DIR] [--checkpoint]

smollm2-*   SmolLM2-135M: the catalogue's Q4_1 file, and Q4_0 and Q8_0 made from it by llama.cpp's quantizer
wide-*      random weights, hidden size 1024, the same tokenizer: Q4_K_M, Q4_0 and Q8_0 by the same quantizer
checkpoint  the Q4_1 file dequantised, as a folder with safetensors (for servers that read no GGUF)
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import gguf
import numpy as np
from install import DEFAULT_FOLDER, llama_tool

from hardpoint.config.model_files import Hub, locate

SOURCE = "smollm2-135m-instruct"
WIDE = {"hidden": 1024, "inner": 2816, "layers": 12, "heads": 16, "kv_heads": 4}
TYPES = {
    "smollm2-q4_1": None,
    "smollm2-q4_0": "Q4_0",
    "smollm2-q8_0": "Q8_0",
    "wide-q4_k_m": "Q4_K_M",
    "wide-q4_0": "Q4_0",
    "wide-q8_0": "Q8_0",
}


def model_file(folder: Path, name: str) -> Path:
    """The GGUF file with one of the names of TYPES; made if it is not there."""
    kind = TYPES[name]
    if kind is None:
        return locate(SOURCE, Hub())
    target = folder / "models" / f"{name}.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    source = locate(SOURCE, Hub()) if name.startswith("smollm2") else wide_file(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_suffix(".part")
    command = [llama_tool(folder, "llama-quantize"), "--allow-requantize", source, work, kind, "2"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    work.rename(target)
    return target


def wide_file(folder: Path) -> Path:
    """A Llama of the second shape with random weights in 16-bit floats."""
    target = folder / "models" / "wide-f16.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_suffix(".part")
    writer = gguf.GGUFWriter(work, "llama")
    source = gguf.GGUFReader(locate(SOURCE, Hub()))
    _copy_tokenizer(source, writer)
    vocabulary = int(next(one for one in source.tensors if one.name == "token_embd.weight").shape[1])
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDE["hidden"])
    writer.add_block_count(WIDE["layers"])
    writer.add_feed_forward_length(WIDE["inner"])
    writer.add_head_count(WIDE["heads"])
    writer.add_head_count_kv(WIDE["kv_heads"])
    writer.add_rope_dimension_count(WIDE["hidden"] // WIDE["heads"])
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, shape in _shapes(vocabulary).items():
        writer.add_tensor(name, _weights(name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    work.rename(target)
    return target


def _copy_tokenizer(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in source.fields.values():
        if field.name.startswith("tokenizer."):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = WIDE["hidden"], WIDE["inner"]
    keys = hidden // WIDE["heads"] * WIDE["kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    for layer in range(WIDE["layers"]):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def _weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    draw = np.random.default_rng(list(name.encode()))
    return (draw.standard_normal(shape, np.float32) * 0.02).astype(np.float16)


def checkpoint(folder: Path) -> Path:
    """The default model dequantised, with transformers' names and order of rows, in bfloat16."""
    target = folder / "models" / "smollm2-safetensors"
    if target.exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = locate(SOURCE, Hub())
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_suffix(".part")
    # transformers puts the rows of Q and K, which GGUF files hold permuted, back into its own order.
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # What was read from a GGUF file still counts as quantised, and such a model cannot be saved.
    facts = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    plain = AutoModelForCausalLM.from_config(type(read.config).from_dict(facts))
    plain.load_state_dict(read.state_dict())
    plain.to(torch.bfloat16).save_pretrained(work)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(work)
    work.rename(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--checkpoint", action="store_true")
    options = parser.parse_args()
    for name in TYPES:
        path = model_file(options.folder, name)
        print(f"{name:<14}{path.stat().st_size / 1e6:8.1f} MB  {path}")
    if options.checkpoint:
        print(f"{'checkpoint':<14}{'':>11}  {checkpoint(options.folder)}")


if __name__ == "__main__":
    main()
