"""Features on a common scale, and the kernel that says how alike two samples are.

The Gaussian kernel's bandwidth is the median distance between samples. Random Fourier features (Rahimi and Recht 2007) give vectors
whose inner products are that kernel's values, so that sums over a part can be kept instead of pairs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_PAIRS = 2000


def standardised(features: NDArray[np.floating]) -> Floats:
    """Columns of mean 0 and deviation 1; constant columns are 0."""
    mean = features.mean(axis=0, dtype=np.float64)
    pieces = range(0, len(features), 65536)
    squares = sum(np.square(features[begin : begin + 65536] - mean).sum(axis=0) for begin in pieces)
    deviation = np.sqrt(squares / max(1, len(features)))
    scale = np.where(deviation > 1e-12 * (1 + np.abs(mean)), deviation, np.inf)
    out = np.empty(features.shape, np.float32)
    for begin in pieces:
        out[begin : begin + 65536] = (features[begin : begin + 65536] - mean) / scale
    return out


def principal(features: NDArray[np.floating], columns: int) -> Floats:
    """The first principal components: raw inputs in fewer columns."""
    mean = features.mean(axis=0, dtype=np.float64)
    total = np.zeros((features.shape[1], features.shape[1]))
    for begin in range(0, len(features), 16384):
        part = features[begin : begin + 16384] - mean
        total += part.T @ part
    values, vectors = np.linalg.eigh(total)
    axes = vectors[:, np.argsort(-values)[:columns]]
    axes *= np.sign(
        axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])]
    )  # one of both directions, always the same
    out = np.empty((len(features), axes.shape[1]), np.float32)
    for begin in range(0, len(features), 16384):
        out[begin : begin + 16384] = (features[begin : begin + 16384] - mean) @ axes
    return out


def bandwidth(features: Floats, random: np.random.Generator) -> float:
    """The median distance of random pairs; 1 if all samples are the same."""
    count = len(features)
    left, right = random.integers(0, count, (2, _PAIRS))
    squares = np.square(features[left] - features[right]).sum(axis=1)
    squares = squares[left != right]
    median = float(np.median(squares)) if len(squares) else 0.0
    return float(np.sqrt(median)) or 1.0


def kernel(left: Floats, right: Floats, width: float) -> Floats:
    """exp(-|x - y|^2 / (2 width^2)) for all pairs."""
    squares: Floats = np.square(left).sum(axis=1)[:, None] + np.square(right).sum(axis=1)[None, :]
    squares -= 2.0 * (left @ right.T)
    np.maximum(squares, 0.0, out=squares)
    squares *= -0.5 / width**2
    np.exp(squares, out=squares)
    return squares


class Fourier:
    """Maps features to `size` numbers whose inner products are the kernel's values, about.

    A cosine and a sine for each frequency, so that every sample has length 1; frequencies at right angles to each other in blocks as
    wide as the features (Yu et al. 2016), which err less than independent ones.

    Args:
        columns: of the features.
        width: of the kernel.
        size: numbers per sample, even.
        random: draws frequencies.
    """

    def __init__(self, columns: int, width: float, size: int, random: np.random.Generator) -> None:
        wide, blocks, missing = max(1, columns), [], size // 2
        while missing > 0:
            take = min(wide, missing)
            axes = np.linalg.qr(random.standard_normal((wide, take)))[0][:columns]
            blocks.append(axes * np.sqrt(random.chisquare(wide, take)))
            missing -= take
        self._frequencies = (np.concatenate(blocks, axis=1) / width).astype(np.float32)
        self._scale = np.float32(np.sqrt(2.0 / size))
        self.size = size

    def map(self, features: Floats) -> Floats:
        """The same samples, mapped."""
        turn = features @ self._frequencies
        out = np.empty((len(features), self.size), np.float32)
        np.cos(turn, out=out[:, : self.size // 2])
        np.sin(turn, out=out[:, self.size // 2 :])
        out *= self._scale
        return out
