"""`exact`: greedy by the scaled graph cut, one sample at a time, with the whole kernel in memory (chunk by chunk).

Maximum mean discrepancy between a part A of share w and its class V falls with

    g(A) = k(A, V) - k(A, A) / (2 w)

so the part whose turn it is takes the free sample with the largest gain, deg[v] - sim[p, v] / w_p. The redundancy of a small part
weighs more: that is where unequal speeds enter. The last turns have little choice left: then every sample may change places once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.policies.partition.quotas import Ints, quotas, turns
from paceline.policies.partition.spread import Floats, bandwidth, kernel

Floats64 = NDArray[np.float64]
CHUNK = 2048  # a kernel of 16 MB; what earlier pieces of a class have given away counts in the later ones


def exact(features: Floats, classes: Ints, quota: Ints, random: np.random.Generator) -> Ints:
    """The part of every sample."""
    out = np.empty(len(classes), np.int64)
    width = bandwidth(features, random)
    for number, row in enumerate(quota):
        members = random.permutation(np.flatnonzero(classes == number))
        before: list[Ints] = []
        for piece, share in zip(*pieces(members, row, CHUNK), strict=True):
            _divide(features, piece, before, share, row / max(1, row.sum()), width, out)
            before.append(piece)
    return out


def pieces(members: Ints, row: Ints, size: int) -> tuple[list[Ints], Ints]:
    """A class cut into pieces of at most `size`, and what each part takes of every piece."""
    count = max(1, -(-len(members) // size))
    cut = np.array_split(members, count)
    if count == 1:
        return cut, row[None, :]
    left, rows = row.astype(float), []
    for number, piece in enumerate(cut):
        share = left / left.sum()
        given = quotas([len(piece)], share.tolist())[0] if number + 1 < count else left.astype(np.int64)
        given = np.minimum(given, left.astype(np.int64))
        for part in np.argsort(-left, kind="stable"):  # what a cap of what is left took away
            lacking = len(piece) - int(given.sum())
            if lacking <= 0:
                break
            given[part] += min(lacking, int(left[part]) - int(given[part]))
        rows.append(given)
        left -= given
    return cut, np.array(rows, np.int64)


def _divide(
    features: Floats, piece: Ints, before: list[Ints], row: Ints, weight: Floats64, width: float, out: Ints
) -> None:
    """Give away one piece of a class, on top of those before it."""
    numbers, scale = np.arange(len(row))[:, None], np.maximum(weight, 1e-12).astype(np.float32)
    alike = kernel(features[piece], features[piece], width)
    degree = alike.sum(axis=1)
    taken = np.zeros((len(row), len(piece)), np.float32)
    for earlier in before:
        across = kernel(features[earlier], features[piece], width)
        degree += across.sum(axis=0)
        taken += (out[earlier] == numbers).astype(np.float32) @ across
    free = np.zeros(len(piece), np.float32)  # -inf once taken
    for part in turns(row.tolist()):
        gain = degree - taken[part] / scale[part]
        gain += free
        chosen = int(np.argmax(gain))
        out[piece[chosen]] = part
        free[chosen] = -np.inf
        taken[part] += alike[chosen]
    out[piece] = _swapped(alike, taken, out[piece], np.float32(1.0) / scale)


def _swapped(alike: Floats, taken: Floats, parts: Ints, weight: Floats) -> Ints:
    """Each sample in turn changes places with the one that helps most, if any does.

    Sample i of part p for j of part r changes sum_p k(A_p, A_p) / w_p, all that is left to minimise, by twice

        (T_p(j) - T_p(i) + 1 - k(i, j)) / w_p + (T_r(i) - T_r(j) + 1 - k(i, j)) / w_r,      T_p(v) = k(v, A_p).

    Args:
        alike: the kernel of the piece.
        taken: T_p(v), by part and sample; kept up to date.
        parts: of the samples.
        weight: 1 / w of each part.
    """
    places = np.arange(len(parts))
    own, weights = taken[parts, places], weight[parts]
    for i in range(len(parts)):
        p = parts[i]
        apart = np.float32(1.0) - alike[i]
        change = (taken[p] - taken[p, i] + apart) * weight[p] + (taken[parts, i] - own + apart) * weights
        change[parts == p] = 0.0
        j = int(np.argmin(change))
        if change[j] < -1e-3:
            r, shift = parts[j], alike[j] - alike[i]
            taken[p] += shift
            taken[r] -= shift
            parts[i], parts[j] = r, p
            own, weights = taken[parts, places], weight[parts]
    return parts
