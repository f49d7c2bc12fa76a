"""`exact`: greedy by the scaled graph cut, one sample at a time, with the whole kernel in memory (chunk by chunk).

Maximum mean discrepancy between a part A of share w and its class V falls with

    g(A) = k(A, V) - k(A, A) / (2 w)

so the part whose turn it is takes the free sample with the largest gain, deg[v] - sim[p, v] / w_p. The redundancy of a small part
weighs more: that is where unequal speeds enter.
"""

from __future__ import annotations

import numpy as np

from paceline.policies.partition.quotas import Ints, quotas, turns
from paceline.policies.partition.spread import Floats, bandwidth, kernel

CHUNK = 5000  # a kernel of 100 MB


def exact(features: Floats, classes: Ints, quota: Ints, random: np.random.Generator) -> Ints:
    """The part of every sample."""
    out = np.empty(len(classes), np.int64)
    width = bandwidth(features, random)
    for number, row in enumerate(quota):
        members = random.permutation(np.flatnonzero(classes == number))
        for piece, share in zip(*pieces(members, row, CHUNK), strict=True):
            out[piece] = _divide(features[piece], share, width)
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


def _divide(features: Floats, row: Ints, width: float) -> Ints:
    alike = kernel(features, features, width)
    degree = alike.sum(axis=1)
    weight = row / max(1, row.sum())
    taken = np.zeros((len(row), len(features)), np.float32)
    free = np.zeros(len(features), np.float32)  # -inf once taken
    out = np.empty(len(features), np.int64)
    for part in turns(row.tolist()):
        gain = degree - taken[part] / np.float32(weight[part])
        gain += free
        chosen = int(np.argmax(gain))
        out[chosen] = part
        free[chosen] = -np.inf
        taken[part] += alike[chosen]
    return out
