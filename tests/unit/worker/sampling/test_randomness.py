import numpy as np

from hardpoint.worker.sampling.randomness import seed_key, seeded_uniforms


def numbers(seed: int, count: int) -> np.ndarray:
    return seeded_uniforms(np.full(count, seed_key(seed), np.uint64), np.arange(count))


def test_a_number_depends_on_seed_and_position_only():
    alone = seeded_uniforms(np.array([seed_key(7)], np.uint64), np.array([5]))
    batch = seeded_uniforms(np.array([seed_key(1), seed_key(7)], np.uint64), np.array([5, 5]))
    assert alone[0] == batch[1]
    assert batch[0] != batch[1]


def test_numbers_are_spread_evenly_over_positions_and_over_seeds():
    for sample in (numbers(0, 20_000), np.array([numbers(seed, 1)[0] for seed in range(5_000)])):
        assert ((sample >= 0) & (sample < 1)).all()
        counts = np.histogram(sample, bins=20, range=(0, 1))[0]
        # Chi-square with 19 degrees of freedom: 50 is passed by chance once in 10,000.
        assert ((counts - len(sample) / 20) ** 2 / (len(sample) / 20)).sum() < 50
        assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.05


def test_seeds_of_any_size_and_sign_are_told_apart():
    seeds = [0, 1, -1, -2, 2**63, 2**64 - 1, 2**64, 2**64 + 1, 2**200, -(2**200)]
    assert len({seed_key(seed) for seed in seeds}) == len(seeds)
