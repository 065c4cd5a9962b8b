"""A checkpoint's tensors on their way into a model, and what is said when they do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from hardpoint.errors import HardpointError, ModelFileError

_SHOWN = 5


class CheckpointTensor(NamedTuple):
    """One tensor.

    name         as the model's `load_weights` expects it
    stored_name  as the file has it        file  its path, for messages
    """

    name: str
    tensor: torch.Tensor
    stored_name: str
    file: str


class Checkpoint:
    """An iterator of (name, tensor) for `load_weights` that remembers where it is and what it gave.

    source       path, for messages about what is missing
    name_stored  from a model's name to the file's, for messages
    """

    def __init__(
        self, source: str, tensors: Iterable[CheckpointTensor], name_stored: Callable[[str], str] = str
    ) -> None:
        self.source = source
        self.current: CheckpointTensor | None = None
        self.given: set[str] = set()
        self._tensors = tensors
        self._name_stored = name_stored

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in self._tensors:
            self.current = entry
            self.given.add(entry.name)
            yield entry.name, entry.tensor
        self.current = None

    def fill(self, model: nn.Module, every_parameter: bool = True) -> None:
        """Load the model; ModelFileError naming file and tensor for one that is missing, unknown or does not fit.

        every_parameter  whether all parameters come from the checkpoint
        """
        try:
            loaded: set[str] | None = model.load_weights(iter(self))  # type: ignore[operator]
        except HardpointError:
            raise
        except (ValueError, AssertionError, LookupError, RuntimeError) as error:
            if self.current is None:
                raise
            raise self._misfit(self.current, error) from error
        if loaded is not None and every_parameter:
            self._check_complete(model, loaded)

    def _misfit(self, entry: CheckpointTensor, error: Exception) -> ModelFileError:
        known_as = "" if entry.name == entry.stored_name else f" ({entry.name})"
        reason = str(error) or type(error).__name__
        return ModelFileError(
            f"{entry.file}: tensor {entry.stored_name!r}{known_as} does not fit the model: {reason}",
            code="model-tensor",
            fix="check that the file belongs to this model and is complete",
        )

    def _check_complete(self, model: nn.Module, loaded: set[str]) -> None:
        packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
        missing: list[str] = []
        for name, _ in model.named_parameters():
            parts = _parts_of(name, packed)
            if name not in loaded:
                missing += parts or [name]
            elif any(part in self.given for part in parts):
                # A fused parameter counts as loaded after its first part.
                missing += [part for part in parts if part not in self.given]
        if missing:
            names = ", ".join(repr(self._name_stored(name)) for name in missing[:_SHOWN])
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ModelFileError(
                f"{self.source}: tensors that the model needs are missing: {names}{more}",
                code="model-tensor-missing",
                fix="the checkpoint is incomplete or belongs to another model; fetch it again",
            )


def _parts_of(parameter: str, packed: dict[str, list[str]]) -> list[str]:
    """The names a checkpoint has for the parts of a fused parameter; empty for one that is not fused."""
    path = parameter.split(".")
    for fused, parts in packed.items():
        if fused in path:
            at = path.index(fused)
            return [".".join([*path[:at], part, *path[at + 1 :]]) for part in parts]
    return []
