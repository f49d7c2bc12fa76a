"""Swaps of two samples of a class between two parts, as long as they make both parts more like the class; stop at any time.

Sample i of part p against j of part r, with S the sums of mapped features and q the sizes: the swap helps if

    2 d . (S_p / q_p - S_r / q_r) + |d|^2 (1 / q_p + 1 / q_r) < 0,      d = Z_j - Z_i
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.policies.partition.balanced import SIZE
from paceline.policies.partition.quotas import Ints
from paceline.policies.partition.spread import Floats, Fourier, bandwidth

_PAIRS = 512


def refine(
    features: Floats,
    classes: Ints,
    parts: Ints,
    num_parts: int,
    random: np.random.Generator,
    more: Callable[[int], bool],
    movable: Ints | None = None,
) -> tuple[Ints, int]:
    """Swap until `more(rounds so far)` says no, or a round over all classes finds nothing.

    Args:
        features: standardised.
        classes: of every sample.
        parts: of every sample; left as it is.
        num_parts: how many parts.
        random: draws the pairs that are tried.
        more: whether to make another round.
        movable: samples that may be swapped; None is all.

    Returns:
        The parts, and the number of swaps.
    """
    parts = parts.copy()
    fourier = Fourier(features.shape[1], bandwidth(features, random), SIZE, random)
    groups = []
    for number in range(int(classes.max()) + 1 if len(classes) else 0):
        members = np.flatnonzero(classes == number)
        able = members if movable is None else np.intersect1d(members, movable)
        if len(able) > 1:
            groups.append((members, able))
    swaps = rounds = 0
    while groups and more(rounds):
        found = sum(_round(features, fourier, members, able, parts, num_parts, random) for members, able in groups)
        swaps, rounds = swaps + found, rounds + 1
        if not found:
            break
    return parts, swaps


def _round(
    features: Floats,
    fourier: Fourier,
    members: Ints,
    able: Ints,
    parts: Ints,
    num_parts: int,
    random: np.random.Generator,
) -> int:
    mapped = fourier.map(features[members])
    mapped -= mapped.mean(axis=0)
    sums = np.zeros((num_parts, fourier.size), np.float32)
    np.add.at(sums, parts[members], mapped)
    sizes = np.bincount(parts[members], minlength=num_parts).astype(np.float32)
    place = np.searchsorted(members, able)
    swaps = 0
    for left, right in zip(*random.permuted(np.tile(place, (2, 1)), axis=1)[:, :_PAIRS], strict=True):
        p, r = parts[members[left]], parts[members[right]]
        if p == r:
            continue
        change = mapped[right] - mapped[left]
        pull = sums[p] / sizes[p] - sums[r] / sizes[r]
        if 2.0 * float(change @ pull) + float(change @ change) * (1.0 / sizes[p] + 1.0 / sizes[r]) < -1e-7:
            parts[members[left]], parts[members[right]] = r, p
            sums[p] += change
            sums[r] -= change
            swaps += 1
    return swaps
