"""The last function of a pooler's head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hardpoint.errors import ModelFileError

# What a sentence-transformers folder may name as a cross-encoder's function.
_NAMED: dict[str, Callable[[], nn.Module]] = {
    "torch.nn.modules.linear.Identity": lambda: PoolerIdentity(),
    "torch.nn.modules.activation.Sigmoid": lambda: LambdaPoolerActivation(torch.sigmoid),
    "torch.nn.modules.activation.Tanh": lambda: LambdaPoolerActivation(torch.tanh),
}


class PoolerActivation(nn.Module):
    """[..., width] -> [..., width], of one request or of several at once."""

    def forward(self, pooled_data: Any) -> Any:
        """Apply it to a tensor or to each of a list."""
        if isinstance(pooled_data, list):
            return [self.forward_chunk(one) for one in pooled_data]
        return self.forward_chunk(pooled_data)

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        """Apply it to one tensor."""
        raise NotImplementedError


class PoolerIdentity(PoolerActivation):
    """Nothing."""

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        """The tensor itself."""
        return pooled_data


class PoolerNormalize(PoolerActivation):
    """Length one."""

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        """Divide by the Euclidean length."""
        return F.normalize(pooled_data, p=2, dim=-1)


class PoolerMultiLabelClassify(PoolerActivation):
    """Labels that do not exclude each other."""

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        """Sigmoid of each."""
        return torch.sigmoid(pooled_data)


class PoolerClassify(PoolerActivation):
    """One of several labels, or whether the only one holds."""

    def __init__(self, static_num_labels: bool = True) -> None:
        super().__init__()

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        """Sigmoid of a single label, softmax of several."""
        return torch.sigmoid(pooled_data) if pooled_data.shape[-1] == 1 else torch.softmax(pooled_data, dim=-1)


class LambdaPoolerActivation(PoolerActivation):
    """Any function."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        """Call it."""
        return self.fn(pooled_data)


def classifier_activation(config: Any) -> nn.Module:
    """The function a model's config means for its labels; ModelFileError for one that is not known."""
    own = getattr(config, "sentence_transformers", None)
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is not None:
        if named not in _NAMED:
            raise ModelFileError(
                f"the model's config names the activation {named!r}, which is not known",
                code="model-pooling",
                fix=f"known: {', '.join(_NAMED)}",
            )
        return _NAMED[named]()
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        return PoolerIdentity()
    return PoolerMultiLabelClassify() if problem == "multi_label_classification" else PoolerClassify()
