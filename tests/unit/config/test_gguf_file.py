"""A sound GGUF file is read exactly; a damaged one is one clear error (bug B30)."""

from __future__ import annotations

import builtins
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from hardpoint.config.gguf_file import BLOCK_SIZES, GGMLType, GGUFFile, is_gguf
from hardpoint.errors import ModelFileError


def write_model(path: Path, **extra_metadata: list[str]) -> dict[str, np.ndarray]:
    """Write a small model with the reference writer; return its tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_string("tokenizer.chat_template", "{{ 'é😊' }}")
    writer.add_array("tokenizer.ggml.tokens", ["a", "Ġthe", "é", ""])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 1, 1])
    writer.add_array("nested.names", [["a"], ["b", "c"]])
    for key, value in extra_metadata.items():
        writer.add_array(key, value)
    rng = np.random.default_rng(0)
    tensors = {"token_embd.weight": rng.random((4, 64), dtype=np.float32), "norm": rng.random(64, dtype=np.float32)}
    packed = gguf.quants.quantize(rng.random((3, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {**tensors, "packed": packed}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_model(path)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        GGUFFile.open(path)
    assert str(path) in caught.value.what
    return str(caught.value)


def test_metadata_and_tensors_equal_what_was_written(tmp_path):
    path = tmp_path / "model.gguf"
    written = write_model(path)
    opened = GGUFFile.open(path)
    assert opened.metadata["general.architecture"] == "llama"
    assert opened.metadata["llama.block_count"] == 2
    assert opened.metadata["tokenizer.ggml.add_bos_token"] is False
    assert opened.metadata["tokenizer.chat_template"] == "{{ 'é😊' }}"
    assert opened.metadata["tokenizer.ggml.tokens"] == ["a", "Ġthe", "é", ""]
    assert opened.metadata["tokenizer.ggml.token_type"] == [1, 3, 1, 1]
    assert opened.metadata["nested.names"] == [["a"], ["b", "c"]]
    assert set(opened.tensors) == set(written)
    for name, values in written.items():
        assert opened.data(opened.tensors[name]).tobytes() == values.tobytes()
    packed = opened.tensors["packed"]
    assert (packed.shape, packed.ggml_type, packed.nbytes) == ((3, 64), GGMLType.Q4_1, 3 * 2 * 20)
    assert opened.tensors["token_embd.weight"].shape == (4, 64)


def test_tensor_bytes_are_a_view_that_cannot_be_written(model):
    opened = GGUFFile.open(model)
    view = opened.data(opened.tensors["norm"])
    assert not view.flags.owndata
    assert not view.flags.writeable


def test_block_sizes_are_those_of_the_gguf_package():
    for kind in gguf.GGMLQuantizationType:
        assert GGMLType[kind.name] == kind
        assert BLOCK_SIZES[GGMLType(kind)] == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("share", [0.5, 0.99, 0.05])
def test_cut_file(model, share):
    data = model.read_bytes()
    model.write_bytes(data[: int(len(data) * share)])
    assert "bytes" in refusal(model)


def test_every_prefix_of_a_file_is_refused_and_none_crashes(model):
    data = model.read_bytes()
    last = max(info.offset + info.nbytes for info in GGUFFile.open(model).tensors.values())
    for length in [*range(1, 700, 7), *range(700, last, 41)]:
        model.write_bytes(data[:length])
        refusal(model)


def test_empty_file(tmp_path):
    path = tmp_path / "empty.gguf"
    path.touch()
    assert "0 bytes" in refusal(path)


def test_web_page(tmp_path):
    path = tmp_path / "page.gguf"
    path.write_text("<!DOCTYPE html><html><body>Not found</body></html>")
    assert "does not start with the letters GGUF" in refusal(path)
    assert not is_gguf(path)


def patched(path: Path, offset: int, layout: str, value: int) -> Path:
    data = bytearray(path.read_bytes())
    struct.pack_into(layout, data, offset, value)
    path.write_bytes(data)
    return path


def test_tensor_count_beyond_the_file(model):
    assert f"{2**60} tensors" in refusal(patched(model, 8, "<Q", 2**60))


def test_metadata_count_beyond_the_file(model):
    assert f"{2**63} metadata keys" in refusal(patched(model, 16, "<Q", 2**63))


def test_key_length_beyond_the_file(model):
    assert "a metadata key" in refusal(patched(model, 24, "<Q", 2**62))


def test_string_length_beyond_the_file(model):
    at = model.read_bytes().index(b"tokenizer.chat_template") + len("tokenizer.chat_template") + 4
    assert "tokenizer.chat_template" in refusal(patched(model, at, "<Q", 2**62))


def test_list_string_length_beyond_the_file(model):
    at = model.read_bytes().index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4 + 12
    assert "tokenizer.ggml.tokens" in refusal(patched(model, at, "<Q", 2**62))


def test_list_length_beyond_the_file(model):
    at = model.read_bytes().index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 4 + 4
    assert "tokenizer.ggml.token_type" in refusal(patched(model, at, "<Q", 2**50))
    assert "tokenizer.ggml.token_type" in refusal(patched(model, at, "<Q", 2**23))


def tensor_entry(path: Path, name: bytes, dims: int) -> int:
    """Offset of the storage type in the table entry of `name`."""
    return path.read_bytes().index(name) + len(name) + 4 + 8 * dims


def test_tensor_offset_past_the_end(model):
    assert "'norm'" in refusal(patched(model, tensor_entry(model, b"norm\x01", 1) - 1 + 4, "<Q", 2**40))


def test_tensor_size_past_the_end(model):
    assert "'norm'" in refusal(patched(model, tensor_entry(model, b"norm\x01", 1) - 1 - 8, "<Q", 2**62))


def test_unknown_storage_type(model):
    assert "storage type 4711" in refusal(patched(model, tensor_entry(model, b"norm\x01", 1) - 1, "<I", 4711))


@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_impossible_alignment(tmp_path, alignment):
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("general.alignment", alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "general.alignment" in refusal(path)


def test_other_versions_and_byte_order(model):
    assert "GGUF version 1" in refusal(patched(model, 4, "<I", 1))
    assert "big-endian" in refusal(patched(model, 4, ">I", 3))


def test_folder_missing_file_and_special_file(tmp_path):
    assert "is a folder" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "absent.gguf")
    assert "not a regular file" in refusal(Path(os.devnull))


def test_no_permission(model, monkeypatch):
    real = builtins.open

    def refuse(path, *args, **kwargs):
        if path == model:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refuse)
    assert "no permission" in refusal(model)


def write_part(path: Path, number: int, count: int, total: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", total)
    writer.add_tensor(f"tensor.{number}", np.full(32, number, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_split_model_is_opened_whole(tmp_path):
    for number in range(3):
        write_part(tmp_path / f"m-{number + 1:05}-of-00003.gguf", number, 3, 3)
    opened = GGUFFile.open(tmp_path / "m-00001-of-00003.gguf")
    assert list(opened.tensors) == ["tensor.0", "tensor.1", "tensor.2"]
    assert opened.data(opened.tensors["tensor.2"]).view(np.float32).tolist() == [2.0] * 32


def test_split_model_with_a_part_missing(tmp_path):
    write_part(tmp_path / "m-00001-of-00002.gguf", 0, 2, 2)
    assert "m-00002-of-00002.gguf is missing" in refusal(tmp_path / "m-00001-of-00002.gguf")


def test_split_model_by_another_part_or_with_tensors_missing(tmp_path):
    write_part(tmp_path / "m-00001-of-00002.gguf", 0, 2, 5)
    write_part(tmp_path / "m-00002-of-00002.gguf", 1, 2, 5)
    assert "path of the first part" in refusal(tmp_path / "m-00002-of-00002.gguf")
    assert "promises 5" in refusal(tmp_path / "m-00001-of-00002.gguf")


def test_damage_anywhere_never_crashes(model):
    """Each byte of the header set to an extreme: read, or refused; never another exception."""
    data = model.read_bytes()
    end = min(info.offset for info in GGUFFile.open(model).tensors.values())
    for offset in range(end):
        damaged = bytearray(data)
        damaged[offset] = (0xFF, 0x80, 0x00)[offset % 3]
        model.write_bytes(damaged)
        try:
            GGUFFile.open(model)
        except ModelFileError:
            continue
