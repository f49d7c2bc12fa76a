"""`rcd`: the partition of He and Dube 2022 (RCD-SGD) as printed: the block with the smallest value picks the sample with the largest
gain, until it is full.

With unequal capacities that is worse than random: small blocks pick as often as large ones until they are full, and large ones get
what is left. It is here to be compared with; `exact` is what works.
"""

from __future__ import annotations

import heapq
from typing import Literal

import numpy as np

from paceline.policies.partition.exact import pieces
from paceline.policies.partition.quotas import Ints
from paceline.policies.partition.spread import Floats, bandwidth, kernel

CHUNK = 2000


def rcd(
    features: Floats,
    classes: Ints,
    quota: Ints,
    random: np.random.Generator,
    value: Literal["facility", "cut"] = "facility",
) -> Ints:
    """The part of every sample, by facility location or by graph cut."""
    out = np.empty(len(classes), np.int64)
    width = bandwidth(features, random)
    divide = _facility if value == "facility" else _cut
    for number, row in enumerate(quota):
        members = random.permutation(np.flatnonzero(classes == number))
        for piece, share in zip(*pieces(members, row, CHUNK), strict=True):
            out[piece] = divide(kernel(features[piece], features[piece], width), share)
    return out


def _cut(alike: Floats, row: Ints) -> Ints:
    """f(A) = sum over v outside A and a in A of sim(v, a)."""
    count = len(alike)
    degree = alike.sum(axis=1) - alike.diagonal()
    inside = np.zeros((len(row), count), np.float32)  # similarity to what the block holds
    free = np.zeros(count, np.float32)
    values, left, out = np.zeros(len(row)), row.copy(), np.empty(count, np.int64)
    for _ in range(count):
        block = int(np.argmin(np.where(left > 0, values, np.inf)))
        gain = degree - 2.0 * inside[block] + free
        chosen = int(np.argmax(gain))
        values[block] += float(gain[chosen])
        out[chosen], free[chosen] = block, -np.inf
        inside[block] += alike[chosen]
        inside[block, chosen] -= alike[chosen, chosen]
        left[block] -= 1
    return out


def _facility(alike: Floats, row: Ints) -> Ints:
    """f(A) = sum over v of the largest sim(v, a); gains only fall, so old ones are upper bounds (lazy greedy)."""
    count = len(alike)
    best = np.zeros((len(row), count), np.float32)
    first = [(-float(gain), sample) for sample, gain in enumerate(alike.sum(axis=0))]
    heapq.heapify(first)
    bounds = [list(first) for _ in row]
    free = np.ones(count, bool)
    values, left, out = np.zeros(len(row)), row.copy(), np.empty(count, np.int64)
    for _ in range(count):
        block = int(np.argmin(np.where(left > 0, values, np.inf)))
        heap = bounds[block]
        while True:
            _, sample = heapq.heappop(heap)
            if not free[sample]:
                continue
            gain = float(np.maximum(alike[sample] - best[block], 0.0).sum())
            if not heap or gain >= -heap[0][0]:
                break
            heapq.heappush(heap, (-gain, sample))
        values[block] += gain
        out[sample], free[sample] = block, False
        np.maximum(best[block], alike[sample], out=best[block])
        left[block] -= 1
    return out
