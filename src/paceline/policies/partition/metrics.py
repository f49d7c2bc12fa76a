"""How alike are the shards? Each figure is a ratio to what a random division of the same sizes would show."""

from __future__ import annotations

import numpy as np

from paceline.policies.partition.balanced import SIZE, centre
from paceline.policies.partition.quotas import Ints
from paceline.policies.partition.spread import Floats, Fourier, bandwidth

_DIRECTIONS, _PROBES = 16, 4096


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
    ratios: list[float] = []
    for number in range(int(classes.max()) + 1):
        members = np.flatnonzero(classes == number)
        if len(members) < 2:
            continue
        count = len(members)
        mean = centre(features, members, fourier)
        spread = 1.0 - float(np.square(mean, dtype=np.float64).sum())  # mapped samples have length 1
        sums = np.zeros((num_parts, fourier.size))
        for some in np.array_split(members, -(-count // 16384)):
            away = fourier.map(features[some]) - mean
            for part in range(num_parts):
                sums[part] += away[parts[some] == part].sum(axis=0, dtype=np.float64)
        sizes = np.bincount(parts[members], minlength=num_parts)
        for part, size in enumerate(sizes.tolist()):
            if not size or size == count or spread <= 1e-6:
                continue
            found = float(np.square(sums[part] / size).sum())
            expected = spread / size * (count - size) / (count - 1)
            ratios.append(found / expected)
    return float(np.mean(ratios)) if ratios else 0.0


def wasserstein_ratio(features: Floats, parts: Ints, num_parts: int, seed: int) -> float:
    """Sliced Wasserstein distance of all parts from the whole, over its expectation for random parts of the same sizes; the mean.

    Distribution functions are compared at 255 quantiles along 16 random directions. Classes are not looked at.
    """
    random = np.random.default_rng((seed, 0x776173))
    directions = random.standard_normal((features.shape[1], _DIRECTIONS)).astype(np.float32)
    probes = np.sort(features[random.integers(0, len(features), _PROBES)] @ directions, axis=0)
    count, sizes = len(parts), np.bincount(parts, minlength=num_parts)
    told = (sizes > 0) & (sizes < count)
    left = (count - sizes[told]) / (sizes[told] * (count - 1)) if count > 1 else np.empty(0)
    found = chance = 0.0
    for number in range(_DIRECTIONS):
        edges = np.unique(probes[:: _PROBES // 256, number][1:])
        if len(edges) < 2:
            continue
        bins = np.searchsorted(edges, features @ directions[:, number], side="left")
        wide = len(edges) + 1
        table = np.bincount(parts * wide + bins, minlength=num_parts * wide).reshape(num_parts, wide)
        whole = np.cumsum(table.sum(axis=0))[:-1] / count
        own = np.cumsum(table[told], axis=1)[:, :-1] / sizes[told][:, None]
        steps = np.gradient(edges.astype(np.float64))
        found += float((np.abs(own - whole) * steps).sum())
        chance += float((np.sqrt(2 / np.pi * whole * (1 - whole) * left[:, None]) * steps).sum())
    return found / chance if chance > 0 else 0.0
