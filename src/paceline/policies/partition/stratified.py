"""`stratified`: every class divided by quota, at random within the class. And `contiguous`: in the order the data has."""

from __future__ import annotations

import numpy as np

from paceline.policies.partition.quotas import Ints


def contiguous(classes: Ints, quota: Ints, random: np.random.Generator) -> Ints:
    """Runs of the dataset's order, as long as the quotas are in all; classes fall where they fall."""
    return np.repeat(np.arange(quota.shape[1]), quota.sum(axis=0))


def stratified(classes: Ints, quota: Ints, random: np.random.Generator) -> Ints:
    """Random within each class."""
    out = np.empty(len(classes), np.int64)
    for number, row in enumerate(quota):
        members = np.flatnonzero(classes == number)
        out[members] = random.permutation(np.repeat(np.arange(len(row)), row))
    return out


def unlabelled(classes: Ints, quota: Ints, random: np.random.Generator) -> Ints:
    """Random, whatever the classes: what the others are measured against."""
    return random.permutation(np.repeat(np.arange(quota.shape[1]), quota.sum(axis=0)))
