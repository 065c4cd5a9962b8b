"""The device's kernels, as ops that torch knows. A real platform would import its compiled library here."""

import torch


@torch.library.custom_op("acme_platforms::rotate", mutates_args=())
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, size] turned by [tokens, 1, size / 2]; halves are pairs."""
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
