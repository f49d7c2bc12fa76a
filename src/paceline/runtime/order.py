"""The order in which samples are used: one permutation per (seed, epoch), the same on every machine.

A keyed Feistel network permutes 0 .. 2^k - 1; positions that land outside the dataset are sent round again until they
land inside (cycle walking), which makes it a permutation of 0 .. length - 1. It needs no memory, gives any slice by
itself, and rests on whole-number arithmetic alone, so unlike machines and library versions get the same order.

Reference: Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains (cycle walking, generalised Feistel).
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
KEEP = 2**18


class Order(Protocol):
    """Sequence of dataset indices for each epoch."""

    def length(self, epoch: int) -> int:
        """How many samples the epoch has."""
        ...

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """The indices at positions start .. stop - 1 of the epoch's order."""
        ...


class Shuffled:
    """A different permutation of the dataset for every epoch.

    Args:
        num_samples: length of the dataset.
        seed: the run's seed.

    Example:
        >>> order = Shuffled(5, seed=0)
        >>> sorted(order.indices(3, 0, 2) + order.indices(3, 2, 5))
        [0, 1, 2, 3, 4]
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed = num_samples, seed
        bits = max(6, (num_samples - 1).bit_length())  # a smaller network would favour some orders
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._whole: tuple[int, list[int]] = (-1, [])

    def length(self, epoch: int) -> int:
        """The dataset's length."""
        return self._num_samples

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """A slice of the epoch's permutation; orders of moderate length are kept whole."""
        if self._num_samples > KEEP:
            return self._slice(epoch, start, stop)
        if self._whole[0] != epoch:
            self._whole = (epoch, self._slice(epoch, 0, self._num_samples))
        return self._whole[1][start:stop]

    def _slice(self, epoch: int, start: int, stop: int) -> list[int]:
        keys = _keys(self._seed, epoch)
        values = self._permute(np.arange(start, stop, dtype=np.uint64), keys)
        outside = np.flatnonzero(values >= self._num_samples)
        while len(outside):
            again = self._permute(values[outside], keys)
            values[outside] = again
            outside = outside[again >= self._num_samples]
        return values.tolist()

    def _permute(self, values: NDArray[np.uint64], keys: list[np.uint64]) -> NDArray[np.uint64]:
        low, high = values & self._low_mask, values >> self._low_bits
        for number, key in enumerate(keys):
            if number % 2:
                high = high ^ (_mix(low + key) & self._high_mask)
            else:
                low = low ^ (_mix(high + key) & self._low_mask)
        return (high << self._low_bits) | low


class Sequential:
    """The dataset's own order, every epoch.

    Args:
        num_samples: length of the dataset.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def length(self, epoch: int) -> int:
        """The dataset's length."""
        return self._num_samples

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Positions are indices."""
        return list(range(start, stop))


class FromSampler:
    """The order of a user's own sampler, read once per epoch; `set_epoch` is called where it has one.

    Args:
        sampler: an iterable of indices, which must give the same sequence on every worker.
    """

    def __init__(self, sampler: object) -> None:
        self._sampler = sampler
        self._epoch, self._indices = -1, [0]

    def _of(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            self._indices = [int(index) for index in self._sampler]  # type: ignore[attr-defined]
            self._epoch = epoch
        return self._indices

    def length(self, epoch: int) -> int:
        """How many indices the sampler gave for this epoch."""
        return len(self._of(epoch))

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """A slice of what the sampler gave."""
        return self._of(epoch)[start:stop]


def digest(order: Order, epoch: int) -> str:
    """A fingerprint of (at most the first 4096 indices of) an epoch's order."""
    head = order.indices(epoch, 0, min(order.length(epoch), 4096))
    return hashlib.sha256(np.array([order.length(epoch), *head], np.int64).tobytes()).hexdigest()[:16]


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    data = b"".join(
        hashlib.blake2b(f"paceline order {seed} {epoch} {half}".encode(), digest_size=64).digest() for half in range(2)
    )
    return [np.uint64(int.from_bytes(data[8 * i : 8 * i + 8], "little")) for i in range(ROUNDS)]


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
