from __future__ import annotations

import hashlib
import sys

import cbor2
import pytest
from engine_fakes import make_request

from hardpoint.engine_core.kv_cache.hashing import ALGORITHMS, block_hasher, hash_function, root_hash
from hardpoint.engine_core.request import Request
from hardpoint.errors import ConfigError
from hardpoint.types.lora_request import LoRARequest


def hashes(prompt: list[int], hasher, salt: str | None = None, adapter: str | None = None) -> list[bytes]:
    request = make_request("r", prompt, salt=salt)
    if adapter:
        request.lora_request = LoRARequest(adapter, 1, "/adapter")
    return Request.from_engine_core_request(request, hasher).block_hashes


@pytest.fixture(params=ALGORITHMS)
def hasher(request):
    return block_hasher(4, hash_function(request.param))


def test_only_full_blocks_have_a_hash(hasher):
    assert [len(hashes(list(range(length)), hasher)) for length in (1, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_a_hash_covers_all_blocks_before_it(hasher):
    first = hashes([1, 2, 3, 4, 5, 6, 7, 8], hasher)
    other_start = hashes([9, 2, 3, 4, 5, 6, 7, 8], hasher)
    other_end = hashes([1, 2, 3, 4, 5, 6, 7, 9], hasher)
    assert first == hashes([1, 2, 3, 4, 5, 6, 7, 8], hasher)
    assert first[0] == other_end[0]
    assert first[1] != other_end[1]
    assert first[0] != other_start[0]
    assert first[1] != other_start[1]


def test_tokens_are_not_confused_by_their_bytes(hasher):
    assert hashes([1, 2, 3, 4], hasher) != hashes([1, 2, 3, 260], hasher)
    assert hashes([256, 0, 0, 0], hasher) != hashes([0, 1, 0, 0], hasher)


def test_salt_and_adapter_are_part_of_every_hash(hasher):
    prompt = list(range(8))
    variants = [
        hashes(prompt, hasher),
        hashes(prompt, hasher, salt="a"),
        hashes(prompt, hasher, salt="b"),
        hashes(prompt, hasher, adapter="a"),
        hashes(prompt, hasher, salt="a", adapter="a"),
    ]
    for position in (0, 1):
        assert len({variant[position] for variant in variants}) == len(variants)


def test_generated_tokens_extend_the_chain(hasher):
    request = Request.from_engine_core_request(make_request("r", [1, 2, 3]), hasher)
    for token in (4, 5, 6, 7, 8, 9):
        request.append_output_token_ids(token)
    assert request.block_hashes == hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], hasher)
    request.append_output_token_ids([1, 2, 3, 4])
    assert len(request.block_hashes) == 3


def test_sha256_cbor_can_be_computed_elsewhere():
    hash_block = hash_function("sha256_cbor")
    parent = bytes(range(32))
    expected = hashlib.sha256(cbor2.dumps((parent, (1, 2), ("adapter", None)), canonical=True)).digest()
    assert hash_block(parent, [1, 2], ("adapter", None)) == expected


def test_the_root_is_random_unless_seeded(monkeypatch):
    hash_block = hash_function("sha256")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert root_hash(hash_block) != root_hash(hash_block)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    seeded = root_hash(hash_block)
    assert seeded == root_hash(hash_block)
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    assert seeded != root_hash(hash_block)


@pytest.mark.parametrize(
    ("algorithm", "package"), [("xxhash", "xxhash"), ("sha256_cbor", "cbor2"), ("xxhash_cbor", "cbor2")]
)
def test_a_missing_package_is_named(monkeypatch, algorithm, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"{algorithm!r} needs the package {package!r}") as caught:
        hash_function(algorithm)
    assert f"pip install {package}" in caught.value.fix


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'md5' is not known") as caught:
        hash_function("md5")
    assert "sha256_cbor" in caught.value.fix
