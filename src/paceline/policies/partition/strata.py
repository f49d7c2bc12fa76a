"""Labels of any kind as classes 0, 1, ...: groups of samples that every part should have its share of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.policies.partition.quotas import Ints
from paceline.policies.partition.spread import Floats

BINS = 10
_SAMPLE, _ROUNDS = 20_000, 25


def strata(labels: NDArray[np.generic] | None, features: Floats, num_parts: int, random: np.random.Generator) -> Ints:
    """The class of every sample.

    | labels | classes |
    |---|---|
    | whole numbers, text, booleans | as they are |
    | other numbers | ten bins of equal counts |
    | a 0/1 matrix, one column per label | the rarest label a sample has; none is a class too |
    | None | clusters of features (k-means) |

    Classes with fewer samples than there are parts are pooled: no quota could be near their share.
    """
    if labels is None:
        found = _clusters(features, max(1, min(BINS, len(features) // max(1, 20 * num_parts))), random)
    elif labels.ndim == 2 and labels.shape[1] > 1:
        found = _rarest(labels)
    elif labels.ndim == 2:
        return strata(labels[:, 0], features, num_parts, random)
    elif labels.dtype.kind == "f":
        found = _bins(labels)
    else:
        found = np.unique(labels, return_inverse=True)[1].astype(np.int64)
    return _pooled(found, num_parts)


def _pooled(classes: Ints, num_parts: int) -> Ints:
    counts = np.bincount(classes)
    small = counts < num_parts
    if int((small & (counts > 0)).sum()) > 1:
        classes = np.where(small[classes], len(counts), classes)
    return np.unique(classes, return_inverse=True)[1].astype(np.int64)


def _bins(values: NDArray[np.generic]) -> Ints:
    numbers = values.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        raise ConfigError(f"labels must be finite: that of sample {bad[0]} is {numbers[bad[0]]}")
    if np.all(numbers == np.round(numbers)) and len(np.unique(numbers)) <= 1000:
        return np.unique(numbers, return_inverse=True)[1].astype(np.int64)
    edges = np.quantile(numbers, np.linspace(0, 1, BINS + 1)[1:-1])
    return np.searchsorted(np.unique(edges), numbers, side="right").astype(np.int64)


def _rarest(labels: NDArray[np.generic]) -> Ints:
    if not np.isin(labels, (0, 1)).all():
        raise ConfigError(
            "a matrix of labels must hold 0 and 1 only, a column per label; give classes or numbers as a vector"
        )
    has = labels.astype(bool)
    often = has.sum(axis=0)
    order = np.where(has, often, np.iinfo(np.int64).max)
    found: Ints = np.where(has.any(axis=1), order.argmin(axis=1), has.shape[1]).astype(np.int64)
    return found


def _clusters(features: Floats, count: int, random: np.random.Generator) -> Ints:
    """Lloyd's algorithm from random samples, on a part of the data if it is large."""
    if count == 1:
        return np.zeros(len(features), np.int64)
    some = features if len(features) <= _SAMPLE else features[random.choice(len(features), _SAMPLE, replace=False)]
    centres = some[random.choice(len(some), count, replace=False)]
    for _ in range(_ROUNDS):
        nearest = _nearest(some, centres)
        sums = np.zeros(centres.shape, np.float64)
        np.add.at(sums, nearest, some)
        counts = np.bincount(nearest, minlength=count)
        moved = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres).astype(np.float32)
        if np.allclose(moved, centres):
            break
        centres = moved
    return np.concatenate([_nearest(part, centres) for part in np.array_split(features, -(-len(features) // 65536))])


def _nearest(features: Floats, centres: Floats) -> Ints:
    squares = np.square(centres).sum(axis=1)[None, :] - 2.0 * (features @ centres.T)
    found: Ints = squares.argmin(axis=1).astype(np.int64)
    return found
