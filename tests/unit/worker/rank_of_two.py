"""One of two ranks that compute the logits of checkpoints together: `python rank_of_two.py RANK PORT JOBS OUT`.

JOBS is a JSON list of [folder, tokens, splits]. By `tensor` the layers are split over both ranks, by `pipeline` each
has half of them; the second rank writes what it found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from paged_model import PagedModel

from hardpoint.worker.distributed import parallel_state


def main(rank: int, port: str, jobs: list[list], out: Path) -> None:
    """Compute all jobs."""
    parallel_state.init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank)
    found: dict[str, torch.Tensor] = {}
    for split, sizes in (("tensor", (2, 1)), ("pipeline", (1, 2))):
        parallel_state.ensure_model_parallel_initialized(*sizes)
        options = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
        for folder, tokens, _ in [job for job in jobs if split in job[2]]:
            found[f"{split} {folder}"] = PagedModel(Path(folder), **options).whole(tokens)
        # What the first rank sent must have been received.
        parallel_state.get_world_group().barrier()
        parallel_state.destroy_model_parallel()
    if rank == 1:
        torch.save(found, out)
    parallel_state.get_world_group().barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
