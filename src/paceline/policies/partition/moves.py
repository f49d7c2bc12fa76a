"""Other quotas for a division that exists: as few samples as possible move, and shards stay alike.

Per class no fewer than sum_p max(0, Q'_p - Q_p) samples can move, and no more do. A part that has too many lets go of samples that
look like it as a whole (a division into two); those who lack some take them by assignment.
"""

from __future__ import annotations

import numpy as np

from paceline.policies.partition.balanced import BATCH, SIZE, assignment, balanced, centre
from paceline.policies.partition.quotas import Ints
from paceline.policies.partition.spread import Floats, Fourier, bandwidth


def fewest(have: Ints, quota: Ints) -> int:
    """The fewest moves that lead from what parts have of each class to its quotas."""
    return int(np.maximum(quota - have, 0).sum())


def move(features: Floats, classes: Ints, parts: Ints, quota: Ints, random: np.random.Generator) -> Ints:
    """The parts after the fewest moves.

    Args:
        features: standardised.
        classes: of every sample.
        parts: of every sample now; -1 for one that has none yet.
        quota: samples of class c for part p, from now on.
        random: draws.
    """
    assign = assignment()
    parts = parts.copy()
    num_parts = quota.shape[1]
    fourier = Fourier(features.shape[1], bandwidth(features, random), SIZE, random)
    for number, row in enumerate(quota):
        members = np.flatnonzero(classes == number)
        if not len(members):
            continue
        have = np.bincount(parts[members][parts[members] >= 0], minlength=num_parts)
        loose = [members[parts[members] < 0]]
        for part in np.flatnonzero(have > row):
            own = members[parts[members] == part]
            split = np.array([[row[part], have[part] - row[part]]], np.int64)
            going = own[balanced(features[own], np.zeros(len(own), np.int64), split, random) == 1]
            parts[going] = -1
            loose.append(going)
        free = np.concatenate(loose)
        if not len(free):
            continue
        mean = centre(features, members, fourier)
        sums = np.zeros((num_parts, SIZE), np.float32)
        staying = members[parts[members] >= 0]
        for some in np.array_split(staying, max(1, -(-len(staying) // 16384))):
            np.add.at(sums, parts[some], fourier.map(features[some]) - mean)
        scale = np.float32(1.0) / np.maximum(row, 1).astype(np.float32)
        lacking = row - np.bincount(parts[staying], minlength=num_parts)
        slots = random.permutation(np.repeat(np.arange(num_parts), lacking))
        for low in range(0, len(free), BATCH):
            some, seats = free[low : low + BATCH], slots[low : low + BATCH]
            mapped = fourier.map(features[some]) - mean
            rows, columns = assign(((mapped @ sums.T) * scale)[:, seats])
            parts[some[rows]] = seats[columns]
            np.add.at(sums, seats[columns], mapped[rows])
    return parts
