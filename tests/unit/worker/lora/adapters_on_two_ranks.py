"""One of two ranks that compute a model with adapters together: `python adapters_on_two_ranks.py RANK PORT FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from adapted_model import logits, manager_of
from paged_model import PagedModel

from hardpoint.worker.distributed import parallel_state
from lora_adapters import KINDS


def halves_of(manager) -> dict[str, list[list[int]]]:
    """Shapes of the pairs of the adapter of every layer, in two layers."""
    found = {}
    for name in ("qkv_proj", "down_proj"):
        part = "self_attn" if name == "qkv_proj" else "mlp"
        update = manager._methods[f"model.layers.0.{part}.{name}"][1].updates["linear"][2][0]
        found[name] = [list(update.first.shape), list(update.second.shape)]
    return found


def main(rank: int, port: str, folder: Path) -> None:
    """Compute with layers split over both ranks, then with half of the layers on each."""
    parallel_state.init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank)
    for split, sizes in (("tensor", (2, 1)), ("pipeline", (1, 2))):
        parallel_state.ensure_model_parallel_initialized(*sizes)
        options = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
        model = PagedModel(folder / "m", **options)
        manager = manager_of(model, folder)
        found = logits(model, manager, list(range(len(KINDS) + 1)))
        if rank == 1:
            torch.save([one.clone() for one in found], folder / f"{split}.pt")
            if split == "tensor":
                (folder / "halves.json").write_text(json.dumps(halves_of(manager)))
        parallel_state.get_world_group().barrier()
        parallel_state.destroy_model_parallel()
    parallel_state.get_world_group().barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
