import numpy as np
import torch

from hardpoint.worker.sampling.randomness import exponentials, seed_key, seeded_streams


def numbers(seeds: list[int], positions: list[int], tokens: int) -> np.ndarray:
    """[seeds or positions, tokens], back in [0, 1]."""
    keys = np.array([seed_key(seed) for seed in seeds], np.uint64)
    found = exponentials(seeded_streams(keys, np.array(positions)), torch.arange(tokens).unsqueeze(0))
    assert (found > 0).all()
    return (-found).exp().numpy()


def test_a_number_depends_on_seed_position_and_token_only():
    alone = numbers([7], [5], 9)
    batch = numbers([1, 7, 7], [5, 5, 6], 9)
    assert (alone[0] == batch[1]).all()
    assert len(np.unique(batch)) == batch.size
    streams = seeded_streams(np.array([seed_key(7)], np.uint64), np.array([5]))
    assert (-exponentials(streams, torch.tensor([[8, 2]]))).exp().tolist()[0] == alone[0, [8, 2]].tolist()


def test_numbers_are_spread_evenly_over_tokens_positions_and_seeds():
    samples = {
        "tokens": numbers([0], [0], 20_000)[0],
        "positions": numbers([0] * 20_000, list(range(20_000)), 1)[:, 0],
        "seeds": numbers(list(range(5_000)), [0] * 5_000, 1)[:, 0],
    }
    for sample in samples.values():
        counts = np.histogram(sample, bins=20, range=(0, 1))[0]
        # Chi-square with 19 degrees of freedom: 50 is passed by chance once in 10,000.
        assert ((counts - len(sample) / 20) ** 2 / (len(sample) / 20)).sum() < 50
        assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.05


def test_seeds_of_any_size_and_sign_are_told_apart():
    seeds = [0, 1, -1, -2, 2**63, 2**64 - 1, 2**64, 2**64 + 1, 2**200, -(2**200)]
    assert len({seed_key(seed) for seed in seeds}) == len(seeds)
