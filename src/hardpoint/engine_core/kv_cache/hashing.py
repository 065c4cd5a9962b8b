"""Names of full blocks: each hash covers the block's tokens, all blocks before it, the adapter and the salt."""

from __future__ import annotations

import importlib
import os
from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from types import ModuleType
from typing import Any

import msgspec

from hardpoint.engine_core.request import BlockHash, BlockHasher, Request
from hardpoint.errors import ConfigError
from hardpoint.log import init_logger

logger = init_logger(__name__)

ExtraKeys = tuple[Any, ...] | None
# (hash of the block before, this block's tokens, extra keys) -> hash
HashFunction = Callable[[BlockHash, Sequence[int], ExtraKeys], BlockHash]
Digest = Callable[[bytes], bytes]

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def hash_function(algorithm: str) -> HashFunction:
    """The function of `--prefix-caching-hash-algo`; ConfigError when unknown or when its package is missing."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"prefix_caching_hash_algo={algorithm!r} is not known",
            code="hash-algorithm",
            fix=f"use one of {', '.join(ALGORITHMS)}",
        )
    digest: Digest
    if algorithm.startswith("sha256"):
        digest = _sha256
    else:
        digest = _require("xxhash", algorithm).xxh3_128_digest
        logger.warning_once(
            "prefix_caching_hash_algo=%s is not collision-resistant: tenants who can craft prompts could "
            "read each other's cached blocks. Use sha256 where that matters.",
            algorithm,
        )
    if algorithm.endswith("_cbor"):
        return _over_cbor(digest, _require("cbor2", algorithm))
    return _over_bytes(digest)


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


def _require(package: str, algorithm: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"prefix_caching_hash_algo={algorithm!r} needs the package {package!r}, which is not installed",
            code="hash-algorithm",
            fix=f"pip install {package}, or use sha256",
        ) from None


def _over_bytes(digest: Digest) -> HashFunction:
    # Unambiguous: the parent and the tokens have fixed sizes, the rest is the extra keys.
    def hash_block(parent: BlockHash, tokens: Sequence[int], extra: ExtraKeys) -> BlockHash:
        data = parent + array("q", tokens).tobytes()
        return digest(data if extra is None else data + msgspec.msgpack.encode(extra))

    return hash_block


def _over_cbor(digest: Digest, cbor2: ModuleType) -> HashFunction:
    dumps = cbor2.dumps

    def hash_block(parent: BlockHash, tokens: Sequence[int], extra: ExtraKeys) -> BlockHash:
        return digest(dumps((parent, tuple(tokens), extra), canonical=True))

    return hash_block


def root_hash(hash_block: HashFunction) -> BlockHash:
    """The parent of every first block: random per process, or made from PYTHONHASHSEED where that is set.

    Random keeps outsiders from guessing hashes; the seed makes instances agree.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None or seed == "random":
        return os.urandom(32)
    return hash_block(bytes(32), (), (seed,))


def block_hasher(block_size: int, hash_block: HashFunction) -> BlockHasher:
    """Return a function that hashes those full blocks of a request that have no hash yet."""
    root = root_hash(hash_block)

    def hash_new_blocks(request: Request) -> list[BlockHash]:
        done = len(request.block_hashes)
        full = request.num_tokens // block_size
        if full <= done:
            return []
        parent = request.block_hashes[-1] if done else root
        hashes = []
        for index in range(done, full):
            tokens = request.all_token_ids[index * block_size : (index + 1) * block_size]
            parent = hash_block(parent, tokens, extra_keys(request, index, block_size))
            hashes.append(parent)
        return hashes

    return hash_new_blocks


def extra_keys(request: Request, block_index: int, block_size: int) -> ExtraKeys:
    """What besides tokens tells blocks apart: the adapter, in the first block the salt, and the media in it.

    An item of media is known by its identifier and by where in the block it begins.
    """
    adapter = request.adapter_key
    salt = request.cache_salt if block_index == 0 else None
    media = _media_keys(request, block_index * block_size, block_size) if request.mm_features else ()
    if adapter is None and salt is None and not media:
        return None
    return (adapter, salt, *media)


def _media_keys(request: Request, start: int, block_size: int) -> tuple[Any, ...]:
    return tuple(
        part
        for feature in request.mm_features
        if feature.mm_position.offset < start + block_size and feature.mm_position.end > start
        for part in (feature.identifier, feature.mm_position.offset - start)
    )
