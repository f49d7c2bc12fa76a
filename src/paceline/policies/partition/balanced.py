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

SIZE = 512
BATCH = 32
MOST = 256  # parts divided at once: an assignment costs their number cubed
_ROWS = 16384  # mapped at once


def balanced(features: Floats, classes: Ints, quota: Ints, random: np.random.Generator) -> Ints:
    """The part of every sample; many parts are divided in groups first, then within each."""
    num_parts = quota.shape[1]
    if num_parts <= MOST:
        return _divide(features, classes, quota, random)
    groups = np.array_split(np.arange(num_parts), -(-num_parts // MOST))
    group = balanced(features, classes, np.stack([quota[:, some].sum(axis=1) for some in groups], axis=1), random)
    out = np.empty(len(classes), np.int64)
    for number, some in enumerate(groups):
        members = np.flatnonzero(group == number)
        out[members] = some[_divide(features[members], classes[members], quota[:, some], random)]
    return out


def _divide(features: Floats, classes: Ints, quota: Ints, random: np.random.Generator) -> Ints:
    assign = assignment()
    out = np.empty(len(classes), np.int64)
    fourier = Fourier(features.shape[1], bandwidth(features, random), SIZE, random)
    batch, numbers = max(BATCH, quota.shape[1]), np.arange(quota.shape[1])[:, None]
    for number, row in enumerate(quota):
        members = np.flatnonzero(classes == number)
        if not len(members):
            continue
        middle = features[members].mean(axis=0, dtype=np.float64).astype(np.float32)
        far = np.concatenate([_squares(features[some] - middle) for some in _cut(members)])
        mean = centre(features, members, fourier)
        members = members[np.argsort(-far, kind="stable")]
        order = turns(row.tolist())
        sums = np.zeros((len(row), SIZE), np.float32)
        scale = np.float32(1.0) / np.maximum(row, 1).astype(np.float32)
        begin = 0
        for some in _cut(members):
            mapped = fourier.map(features[some]) - mean
            for low in range(0, len(mapped), batch):
                few = mapped[low : low + batch]
                slots = order[begin + low : begin + low + len(few)]
                cost = (few @ sums.T) * scale
                rows, columns = assign(cost[:, slots])
                parts = slots[columns]
                out[some[low + rows]] = parts
                sums += (parts == numbers).astype(np.float32) @ few[rows]
            begin += len(some)
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


def centre(features: Floats, members: Ints, fourier: Fourier) -> Floats:
    """The mean of mapped samples."""
    total = np.zeros(fourier.size, np.float64)
    for some in _cut(members):
        total += fourier.map(features[some]).sum(axis=0, dtype=np.float64)
    return (total / len(members)).astype(np.float32)


def _cut(members: Ints) -> list[Ints]:
    return [members[begin : begin + _ROWS] for begin in range(0, len(members), _ROWS)]


def _squares(rows: Floats) -> Floats:
    found: Floats = np.einsum("ij,ij->i", rows, rows)
    return found
