"""The data of the workloads: nothing is downloaded."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from paceline.bench.task import Rows
from paceline.errors import ConfigError

FOLDER = "PACELINE_FASHION_MNIST"  # environment: where the four idx files are
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def digits() -> tuple[Rows, Rows]:
    """scikit-learn's digits: 1437 images of 8x8 to train on, 360 to test on, shuffled once."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("the digits need scikit-learn: pip install 'paceline[demo]'") from None
    loaded = load_digits()
    order = torch.randperm(len(loaded.target), generator=torch.Generator().manual_seed(0))
    x = (torch.from_numpy(loaded.images).float() / 16.0 - 0.5).unsqueeze(1)[order]
    y = torch.from_numpy(loaded.target).long()[order]
    return Rows(x[:1437], y[:1437]), Rows(x[1437:], y[1437:])


def fashion(side: int = 28) -> tuple[Rows, Rows]:
    """Fashion-MNIST: 60000 images to train on, 10000 to test on, padded to `side` pixels."""
    folder = Path(os.environ.get(FOLDER, DEBIAN))
    arrays = [idx(_find(folder, name)) for name in _FILES]
    for images, labels, name in ((arrays[0], arrays[1], _FILES[0]), (arrays[2], arrays[3], _FILES[2])):
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise ConfigError(
                f"{folder}/{name} must hold images with as many labels beside them, got shapes {images.shape} and "
                f"{labels.shape}"
            )
    rows = []
    for images, labels in ((arrays[0], arrays[1]), (arrays[2], arrays[3])):
        pad = (side - images.shape[1]) // 2
        x = torch.from_numpy(images).float().div(255.0).sub(0.286).div(0.353).unsqueeze(1)
        rows.append(Rows(torch.nn.functional.pad(x, (pad,) * 4), torch.from_numpy(labels).long()))
    return rows[0], rows[1]


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise ConfigError(
        f"Fashion-MNIST must be in {folder}: there is no {name} or {name}.gz. On Debian: apt install dataset-fashion-mnist; "
        f"elsewhere put the four idx files into a folder and set {FOLDER} to it"
    )


def idx(path: Path) -> np.ndarray:
    """An array of bytes in the idx format: two zeros, type 8, number of dimensions, each as big-endian, then the values."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read ({error}): it may be truncated; get it again") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ConfigError(f"{path} must be an idx file of bytes, but begins with {data[:4].hex()}")
    count = data[3]
    if len(data) < 4 + 4 * count:
        raise ConfigError(f"{path} is truncated: {len(data)} bytes")
    shape = struct.unpack(f">{count}I", data[4 : 4 + 4 * count])
    wanted = int(np.prod(shape))
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * count)
    if len(values) != wanted:
        raise ConfigError(f"{path} is truncated: {len(values)} values where its header says {wanted}; get it again")
    return values.reshape(shape).copy()


def text(context: int) -> tuple[Rows, Rows, int]:
    """Python's own language reference, by character, in pieces of `context`; the number of characters is third."""
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()
    letters = sorted(set(joined))
    number = {letter: code for code, letter in enumerate(letters)}
    codes = torch.tensor([number[letter] for letter in joined])
    pieces = (len(codes) - 1) // context
    x = codes[: pieces * context].view(pieces, context)
    y = codes[1 : pieces * context + 1].view(pieces, context)
    order = torch.randperm(pieces, generator=torch.Generator().manual_seed(0))
    cut = pieces - pieces // 20
    return Rows(x[order[:cut]], y[order[:cut]]), Rows(x[order[cut:]], y[order[cut:]]), len(letters)
