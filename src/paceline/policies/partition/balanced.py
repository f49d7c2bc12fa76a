"""`balanced`: a few microseconds per sample, for any number of them.

Samples become random Fourier features less the mean of their class, far ones first. Batches of them meet the next turns of the
parts in a linear assignment: sample i costs part p what it has in common with what p holds already, Z_i . S_p / q_p. So sums over
parts stay near zero: every part looks like its class.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.policies.partition.quotas import Ints, turns
from paceline.policies.partition.spread import Floats, Fourier, bandwidth

SIZE = 256
BATCH = 64
_ROWS = 16384  # mapped at once


def balanced(features: Floats, classes: Ints, quota: Ints, random: np.random.Generator) -> Ints:
    """The part of every sample."""
    assign = assignment()
    out = np.empty(len(classes), np.int64)
    fourier = Fourier(features.shape[1], bandwidth(features, random), SIZE, random)
    batch, numbers = max(BATCH, quota.shape[1]), np.arange(quota.shape[1])[:, None]
    for number, row in enumerate(quota):
        members = np.flatnonzero(classes == number)
        if not len(members):
            continue
        mean, far = centre(features, members, fourier)
        members = members[np.argsort(-far, kind="stable")]
        order = turns(row.tolist())
        sums = np.zeros((len(row), SIZE), np.float32)
        scale = np.float32(1.0) / np.maximum(row, 1).astype(np.float32)
        for begin in range(0, len(members), _ROWS):
            mapped = fourier.map(features[members[begin : begin + _ROWS]]) - mean
            for low in range(0, len(mapped), batch):
                some = mapped[low : low + batch]
                slots = order[begin + low : begin + low + len(some)]
                cost = (some @ sums.T) * scale
                rows, columns = assign(cost[:, slots])
                parts = slots[columns]
                out[members[begin + low + rows]] = parts
                sums += (parts == numbers).astype(np.float32) @ some[rows]
    return out


def assignment() -> Any:
    """SciPy's linear assignment."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ModuleNotFoundError:
        raise ConfigError(
            "this partition needs SciPy: pip install 'paceline[partition]', or use method='exact' or 'stratified'"
        ) from None
    return linear_sum_assignment


def centre(features: Floats, members: Ints, fourier: Fourier) -> tuple[Floats, Floats]:
    """The mean of mapped samples, and how far each is from it."""
    total = np.zeros(fourier.size, np.float64)
    for begin in range(0, len(members), _ROWS):
        total += fourier.map(features[members[begin : begin + _ROWS]]).sum(axis=0, dtype=np.float64)
    mean = (total / len(members)).astype(np.float32)
    far = np.empty(len(members), np.float32)
    for begin in range(0, len(members), _ROWS):
        away = fourier.map(features[members[begin : begin + _ROWS]]) - mean
        far[begin : begin + len(away)] = np.einsum("ij,ij->i", away, away)
    return mean, far
