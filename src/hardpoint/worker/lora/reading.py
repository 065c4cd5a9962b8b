"""Adapters as PEFT saves them: `adapter_config.json` beside `adapter_model.safetensors`.

The settings are checked before a tensor is looked at, and names and shapes before a tensor is read. Whatever is
wrong is a ModelFileError that names the file and what to do. Pickled weights are never opened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hardpoint.errors import ModelFileError

SETTINGS_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED = ("adapter_model.bin", "adapter_model.pt")
_LARGEST_SETTINGS = 1 << 20
_TYPES = ("F32", "F16", "BF16")

# A setting that changes what an adapter computes, the values that change nothing, and what it means.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("use_dora", (None, False), "DoRA (weight-decomposed adapters)"),
    ("lora_bias", (None, False), "a bias on the low-rank part"),
    ("bias", (None, "none"), "trained biases"),
    ("modules_to_save", (None, []), "whole modules trained beside the low-rank part"),
    ("trainable_token_indices", (None, [], {}), "single trained token embeddings"),
    ("target_parameters", (None, []), "adapters of bare parameters, such as experts"),
    ("layer_replication", (None, []), "replicated layers"),
    ("use_qalora", (None, False), "QA-LoRA (pooled inputs)"),
    ("alora_invocation_tokens", (None, []), "activated LoRA, which begins within a prompt"),
    ("arrow_config", (None,), "routing among adapters"),
    ("use_bdlora", (None, False), "BD-LoRA (block-diagonal halves)"),
    ("kasa_config", (None,), "KaSA (scaled singular values)"),
    ("monteclora_config", (None,), "MonteCLoRA"),
    ("megatron_config", (None,), "Megatron layers"),
)
# What is left of a tensor's name without the module's path: (which half, whether of an embedding).
_HALVES = {
    "lora_A.weight": ("A", False), "lora_B.weight": ("B", False),
    "lora_A.default.weight": ("A", False), "lora_B.default.weight": ("B", False),
    "lora_embedding_A": ("A", True), "lora_embedding_B": ("B", True),
    "lora_embedding_A.default": ("A", True), "lora_embedding_B.default": ("B", True),
}  # fmt: skip
_NAME = re.compile(
    r"^(?:base_model\.model\.)?(?P<module>.+?)\."
    r"(?P<half>lora_[AB](?:\.default)?\.weight|lora_embedding_[AB](?:\.default)?)$"
)
_WHOLE = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer)?\.weight$")


@dataclass(frozen=True)
class AdapterSettings:
    """What `adapter_config.json` says.

    rank, alpha        for every module without a pattern of its own
    rank_pattern, alpha_pattern   module name, or a regular expression of its end -> its own
    rank_stabilised    scale by alpha / sqrt(rank) instead of alpha / rank
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilised: bool

    def rank_of(self, module: str) -> int:
        """Rank of a module's pair."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of a module's pair is multiplied with."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilised else alpha / rank

    @property
    def largest_rank(self) -> int:
        """Of all modules."""
        return max([self.rank, *self.rank_pattern.values()])


@dataclass(frozen=True)
class Pair:
    """Where the two halves of one module's adapter are in the file.

    first   [rank, inputs]      second  [outputs, rank]
    """

    module: str
    embedding: bool
    first: str
    second: str


class AdapterFile:
    """An open adapter: its settings, its pairs and, on demand, its tensors."""

    def __init__(self, name: str, folder: Path, settings: AdapterSettings, weights: Any) -> None:
        self.name, self.folder, self.settings = name, folder, settings
        self._weights = weights
        self.pairs: list[Pair] = []
        # Modules whose whole weights came along: PEFT writes the base model's embeddings beside an adapter of them.
        self.whole: dict[str, str] = {}
        self._sort_names()

    def _sort_names(self) -> None:
        halves: dict[tuple[str, bool], dict[str, str]] = {}
        for stored in self._weights.keys():  # noqa: SIM118 - not a dict
            match = _NAME.match(stored)
            if match is not None:
                half, embedding = _HALVES[match["half"]]
                halves.setdefault((match["module"], embedding), {})[half] = stored
                continue
            match = _WHOLE.match(stored)
            if match is None or "lora_" in stored:
                raise self.bad(f"tensor {stored!r} is no part of a LoRA adapter", "save it with PEFT's save_pretrained")
            self.whole[match["module"]] = stored
        for (module, embedding), found in halves.items():
            if len(found) != 2:
                missing = "lora_B" if "A" in found else "lora_A"
                raise self.bad(f"module {module!r} has no {missing}", "the file is incomplete; save or fetch it again")
            self.pairs.append(Pair(module, embedding, found["A"], found["B"]))
        if not self.pairs:
            raise self.bad("it has no adapter weights", "save it with PEFT's save_pretrained")

    def shape(self, stored: str) -> tuple[int, ...]:
        """Shape of a tensor; ModelFileError for one that is not of a float type we read."""
        view = self._weights.get_slice(stored)
        if view.get_dtype() not in _TYPES:
            raise self.bad(f"tensor {stored!r} is {view.get_dtype()}", "save it in float32, float16 or bfloat16")
        return tuple(view.get_shape())

    def read(self, stored: str) -> torch.Tensor:
        """A tensor, as it is stored."""
        try:
            return self._weights.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise self.bad(f"tensor {stored!r} cannot be read: {error}", "fetch or save the file again") from None

    def bad(self, what: str, fix: str, code: str = "lora-weights") -> ModelFileError:
        """An error about the weights."""
        return ModelFileError(
            f"adapter {self.name!r}: {WEIGHTS_FILE}: {what}", code=code, origin=str(self.folder / WEIGHTS_FILE), fix=fix
        )


@contextmanager
def open_adapter(name: str, path: str, max_rank: int) -> Iterator[AdapterFile]:
    """Open the adapter in the folder `path`; ModelFileError for one that is missing, damaged or not for us.

    max_rank  of all modules, as --max-lora-rank says
    """
    folder = Path(path).expanduser()
    settings = read_settings(name, folder)
    if settings.largest_rank > max_rank:
        raise ModelFileError(
            f"adapter {name!r}: {SETTINGS_FILE}: rank {settings.largest_rank} is more than max_lora_rank={max_rank}",
            code="lora-rank",
            origin=str(folder / SETTINGS_FILE),
            fix=f"start with --max-lora-rank {_next_rank(settings.largest_rank)}",
        )
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise _no_weights(name, folder)
    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"adapter {name!r}: {WEIGHTS_FILE} is cut, damaged or not a safetensors file ({error})",
            code="lora-weights", origin=str(file), fix="fetch or save it again",
        ) from None  # fmt: skip
    with opened as weights:
        yield AdapterFile(name, folder, settings, weights)


def read_settings(name: str, folder: Path) -> AdapterSettings:
    """Read and check `adapter_config.json`; ModelFileError for what we cannot do."""
    file = folder / SETTINGS_FILE
    where = f"adapter {name!r}: {SETTINGS_FILE}"

    def bad(what: str, fix: str, code: str = "lora-config") -> ModelFileError:
        return ModelFileError(f"{where}{what}", code=code, origin=str(file), fix=fix)

    if not file.is_file():
        raise bad(" is not there", "give the folder that PEFT's save_pretrained wrote", "lora-missing")
    if file.stat().st_size > _LARGEST_SETTINGS:
        raise bad(f" is larger than {_LARGEST_SETTINGS} bytes", "it is not an adapter's settings")
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise bad(f" cannot be read: {error}", "fetch or save it again") from None
    if not isinstance(facts, dict) or facts.get("peft_type") != "LORA":
        kind = facts.get("peft_type") if isinstance(facts, dict) else None
        raise bad(f": peft_type is {kind!r}", "only LORA adapters can be served")
    for key, harmless, meaning in _REFUSED:
        if facts.get(key) not in harmless:
            raise bad(
                f": {key} is {_shown(facts[key])}: {meaning} is not supported",
                "merge the adapter into the model, or train it without", "lora-unsupported",
            )  # fmt: skip
    try:
        return _settings(facts)
    except (TypeError, ValueError) as error:
        raise bad(f": {error}", "save it again with PEFT") from None


def _settings(facts: dict[str, Any]) -> AdapterSettings:
    ranks = {str(key): _rank(f"rank_pattern[{key!r}]", value) for key, value in _table(facts, "rank_pattern").items()}
    alphas = {
        str(key): _number(f"alpha_pattern[{key!r}]", value) for key, value in _table(facts, "alpha_pattern").items()
    }
    rank = _rank("r", facts.get("r"))
    alpha = _number("lora_alpha", facts.get("lora_alpha", rank))
    for pattern in (*ranks, *alphas):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"the pattern {pattern[:80]!r} is no regular expression: {error}") from None
    return AdapterSettings(rank, alpha, ranks, alphas, bool(facts.get("use_rslora", False)))


def _table(facts: dict[str, Any], key: str) -> dict[str, Any]:
    table = facts.get(key) or {}
    if not isinstance(table, dict):
        raise TypeError(f"{key} must be an object")
    return table


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 16:
        raise ValueError(f"{name} must be a rank of at least 1, got {_shown(value)}")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {_shown(value)}")
    return float(value)


def _by_pattern(table: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    for pattern, value in table.items():
        if re.match(rf"(?:.*\.)?(?:{pattern})$", module):
            return value
    return otherwise


def _no_weights(name: str, folder: Path) -> ModelFileError:
    pickled = next((other for other in _PICKLED if (folder / other).exists()), None)
    if pickled is None:
        what, fix = f"{WEIGHTS_FILE} is not there", "give the folder that PEFT's save_pretrained wrote"
    else:
        what = f"{pickled} is pickled, and reading it would run its code; {WEIGHTS_FILE} is not there"
        fix = "save the adapter with safe_serialization=True"
    return ModelFileError(f"adapter {name!r}: {what}", code="lora-missing", origin=str(folder), fix=fix)


def _next_rank(rank: int) -> int:
    return next((known for known in (1, 8, 16, 32, 64, 128, 256, 320, 512) if known >= rank), rank)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
