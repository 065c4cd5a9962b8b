"""Layers of ours that take the place of the built-in ones."""

import torch

from hardpoint.contracts.custom_op import maybe_get_oot_by_class
from hardpoint.worker.layers.rotary_embedding import RotaryEmbedding


class AcmeDeviceRotary(RotaryEmbedding):
    """The plain rotary embedding by our kernel."""

    turned = 0

    def forward_oot(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a layer computes on a platform that is not built in."""
        if not self.is_neox_style or self.rotary_dim != self.head_size:
            return self.forward_native(positions, query, key)
        AcmeDeviceRotary.turned += 1
        table = self.cos_sin_cache.index_select(0, positions).to(query.dtype)
        cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
        return self._rotate(query, cos, sin), None if key is None else self._rotate(key, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(cos), -1, self.head_size)
        return torch.ops.acme_platforms.rotate(heads, cos, sin).view(x.shape)


def register() -> None:
    """Replace the layer in this process."""
    if maybe_get_oot_by_class(RotaryEmbedding) is RotaryEmbedding:
        RotaryEmbedding.register_oot(AcmeDeviceRotary)
