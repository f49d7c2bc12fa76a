"""How alike are the shards? Each figure is a ratio to what a random division of the same sizes would show."""

from __future__ import annotations

import numpy as np

from paceline.policies.partition.balanced import SIZE
from paceline.policies.partition.quotas import Ints
from paceline.policies.partition.spread import Floats, Fourier, bandwidth


def class_error(classes: Ints, parts: Ints, quota: Ints) -> int:
    """The largest difference between what a part has of a class and its quota."""
    have = np.zeros_like(quota)
    np.add.at(have, (classes, parts), 1)
    return int(np.abs(have - quota).max())


def total_variation(classes: Ints, parts: Ints, num_parts: int) -> float:
    """The largest total variation between a part's class mix and the whole's."""
    num_classes = int(classes.max()) + 1
    have = np.zeros((num_classes, num_parts))
    np.add.at(have, (classes, parts), 1)
    whole = have.sum(axis=1) / have.sum()
    mixes = have[:, have.sum(axis=0) > 0]
    mixes = mixes / mixes.sum(axis=0)
    return float(0.5 * np.abs(mixes - whole[:, None]).sum(axis=0).max())


def mmd_ratio(features: Floats, classes: Ints, parts: Ints, num_parts: int, seed: int) -> float:
    """Squared maximum mean discrepancy of every (class, part), over its expectation for a random part of that size; the mean.

    On random features drawn for this alone, not those a method worked with.
    """
    random = np.random.default_rng((seed, 0x6D6D64))
    fourier = Fourier(features.shape[1], bandwidth(features, random), SIZE, random)
    ratios = []
    for number in range(int(classes.max()) + 1):
        members = np.flatnonzero(classes == number)
        if len(members) < 2:
            continue
        mapped = np.concatenate(
            [fourier.map(features[some]) for some in np.array_split(members, -(-len(members) // 16384))]
        )
        mapped -= mapped.mean(axis=0)
        spread = float(np.square(mapped).sum(axis=1).mean())
        count = len(members)
        for part in range(num_parts):
            chosen = parts[members] == part
            size = int(chosen.sum())
            if not size or size == count or spread <= 1e-12:
                continue
            found = float(np.square(mapped[chosen].mean(axis=0)).sum())
            expected = spread / size * (count - size) / (count - 1)
            ratios.append(found / expected)
    return float(np.mean(ratios)) if ratios else 0.0
