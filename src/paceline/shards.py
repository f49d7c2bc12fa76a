"""`paceline.partition`: shards that follow speed and look alike, as a plan that can be kept, changed and looked at.

    plan = paceline.partition(features, labels, speeds=[1, 2, 3])
    plan.save("shards")                                  # shards/plan.json and its arrays
    plan, moves = plan.rebalance([1, 1, 3])              # as few samples as possible move
    plan, moves = plan.extend(more_features, more_labels)

NumPy and SciPy; torch is not needed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.policies.partition import chosen, divide
from paceline.policies.partition.metrics import class_error, mmd_ratio, total_variation, wasserstein_ratio
from paceline.policies.partition.moves import fewest, move
from paceline.policies.partition.quotas import Ints, quotas, shares
from paceline.policies.partition.spread import Floats, principal, standardised
from paceline.policies.partition.strata import strata
from paceline.policies.partition.swaps import refine

SCHEMA = 1
_PROBED = 4096  # rows that the fingerprint looks at
Tell = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class Moves:
    """What changes hands.

    Args:
        samples: their numbers.
        before: the part each was in; -1 for a new sample.
        after: the part it goes to.
        fewest: no division by these quotas could move fewer.
    """

    samples: Ints
    before: Ints
    after: Ints
    fewest: int

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """Which sample belongs to which part.

    Args:
        parts: the part of every sample.
        classes: the class of every sample, as quotas count it.
        quota: samples of class c for part p.
        speeds: of the parts.
        method: how it was made.
        seed: of what was drawn.
        fingerprint: of the data it was made for.
        metrics: how alike shards are.
        columns: principal components of the features that it looks at; None is the features themselves.
        data: features and labels it was made from, if they are at hand; needed to change it.
    """

    parts: Ints
    classes: Ints
    quota: Ints
    speeds: tuple[float, ...]
    method: str
    seed: int
    fingerprint: str
    metrics: dict[str, float]
    columns: int | None = None
    data: tuple[NDArray[Any], NDArray[Any] | None] | None = None

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return len(self.speeds)

    def samples(self, part: int) -> Ints:
        """The samples of a part, in the order of the dataset."""
        return np.flatnonzero(self.parts == part)

    def rebalance(self, speeds: Sequence[float]) -> tuple[ShardPlan, Moves]:
        """For other speeds, or more parts: a new plan, and what moves. A part that has left gets speed 0.

        Raises:
            ConfigError: the data is not at hand, or fewer parts are named than there are.
        """
        if len(speeds) < self.num_parts:
            raise ConfigError(
                f"parts keep their numbers: name at least {self.num_parts} speeds, 0 for a part that has left; got "
                f"{len(speeds)}"
            )
        features, _ = self._data()
        return self._moved(_ready(features, self.columns), self.classes, self.parts, speeds)

    def extend(self, features: NDArray[Any], labels: NDArray[Any] | None = None) -> tuple[ShardPlan, Moves]:
        """With more samples, numbered after those there are: a new plan, and what moves beside the new ones.

        Args:
            features: of the new samples alone.
            labels: theirs, if the plan was made with labels.
        """
        old, old_labels = self._data()
        if (labels is None) != (old_labels is None):
            raise ConfigError("a plan made with labels is extended with labels, one without them without")
        if features.ndim != 2 or features.shape[1] != old.shape[1]:
            raise ConfigError(
                f"new features must have {old.shape[1]} columns, as the plan's; got shape {features.shape}"
            )
        joined = np.concatenate([old, features])
        joined_labels = None if labels is None or old_labels is None else np.concatenate([old_labels, labels])
        _check(joined, joined_labels, self.num_parts)
        ready = _ready(joined, self.columns)
        classes = strata(joined_labels, ready, self.num_parts, np.random.default_rng((self.seed, 0)))
        parts = np.concatenate([self.parts, np.full(len(features), -1, np.int64)])
        plan, moves = self._moved(ready, classes, parts, self.speeds)
        kept = replace(plan, fingerprint=fingerprint(joined, joined_labels), data=(joined, joined_labels))
        return kept, moves

    def with_parts(self, parts: Ints, speeds: Sequence[float]) -> tuple[ShardPlan, Moves]:
        """This plan with parts that somebody else has worked out; metrics are not computed anew."""
        quota = np.zeros((len(self.quota), len(speeds)), np.int64)
        np.add.at(quota, (self.classes, parts), 1)
        have = np.zeros((len(self.quota), max(len(speeds), self.num_parts)), np.int64)
        np.add.at(have, (self.classes, self.parts), 1)
        changed = np.flatnonzero(parts != self.parts)
        wide = np.pad(quota, ((0, 0), (0, have.shape[1] - quota.shape[1])))
        plan = replace(self, parts=parts, quota=quota, speeds=tuple(map(float, speeds)))
        return plan, Moves(changed, self.parts[changed], parts[changed], fewest(have, wide))

    def _moved(self, ready: Floats, classes: Ints, before: Ints, speeds: Sequence[float]) -> tuple[ShardPlan, Moves]:
        weights, num_classes = shares(speeds), int(classes.max()) + 1
        quota = quotas(np.bincount(classes, minlength=num_classes).tolist(), weights)
        random = np.random.default_rng((self.seed, 1))
        parts = move(ready, classes, before, quota, random)
        changed = np.flatnonzero(parts != before)
        parts, _ = refine(ready, classes, parts, len(speeds), random, lambda rounds: rounds < 3, changed)
        changed = np.flatnonzero(parts != before)
        have = np.zeros_like(quota)
        placed = before >= 0
        np.add.at(have, (classes[placed], before[placed]), 1)
        plan = replace(
            self,
            parts=parts,
            classes=classes,
            quota=quota,
            speeds=tuple(map(float, speeds)),
            metrics=_metrics(ready, classes, parts, quota, self.seed),
        )
        return plan, Moves(changed, before[changed], parts[changed], fewest(have, quota))

    def _data(self) -> tuple[NDArray[Any], NDArray[Any] | None]:
        if self.data is None:
            raise ConfigError(
                "a plan needs its data to be changed: read it with paceline.shards.load(folder, features, labels)"
            )
        return self.data

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write plan.npz and plan.json, each atomically; what was there stays until the new one is whole."""
        home = Path(folder)
        try:
            home.mkdir(parents=True, exist_ok=True)
            arrays = io.BytesIO()
            np.savez_compressed(arrays, parts=self.parts, classes=self.classes, quota=self.quota)
            content = {
                "schema": SCHEMA,
                "method": self.method,
                "seed": self.seed,
                "columns": self.columns,
                "speeds": list(self.speeds),
                "fingerprint": self.fingerprint,
                "metrics": self.metrics,
                "sizes": np.bincount(self.parts, minlength=self.num_parts).tolist(),
                "sha256": hashlib.sha256(arrays.getvalue()).hexdigest(),
            }
            # The arrays carry the digest's name, so that the pair on disk always belongs together.
            name = f"plan-{content['sha256'][:12]}.npz"
            _write(home / name, arrays.getvalue())
            _write(home / "plan.json", json.dumps({**content, "arrays": name}, indent=1).encode())
        except OSError as error:
            raise ConfigError(
                f"the plan could not be written to {home}: {error.strerror}. The one that was there is as it was"
            ) from error
        for old in home.glob("plan-*.npz"):
            if old.name != name:
                old.unlink()


def load(
    folder: str | os.PathLike[str], features: NDArray[Any] | None = None, labels: NDArray[Any] | None = None
) -> ShardPlan:
    """The plan in a folder; with its data it can be changed.

    Raises:
        ConfigError: there is none, it is damaged or of a newer schema, or it was made for other data.
    """
    home = Path(folder)
    try:
        content = json.loads((home / "plan.json").read_text(encoding="utf-8"))
        data = (home / content["arrays"]).read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{home} must be the folder of a plan: there is no {error.filename}") from None
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{home / 'plan.json'} is damaged: {error}") from None
    if content["schema"] > SCHEMA:
        raise ConfigError(f"{home} has schema {content['schema']}, this paceline reads up to {SCHEMA}: update paceline")
    if hashlib.sha256(data).hexdigest() != content["sha256"]:
        raise ConfigError(f"{home / content['arrays']} is damaged: its contents are not those it was written with")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            parts, classes, quota = arrays["parts"], arrays["classes"], arrays["quota"]
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ConfigError(f"{home / content['arrays']} is damaged: {error}") from None
    if features is not None:
        found = fingerprint(features, labels)
        if found != content["fingerprint"] or len(features) != len(parts):
            raise ConfigError(
                f"a plan belongs to the data it was made for: {home} has {len(parts)} samples with fingerprint "
                f"{content['fingerprint']}, this data {len(features)} with {found}. Make a new plan, or use extend"
            )
    return ShardPlan(
        parts,
        classes,
        quota,
        tuple(content["speeds"]),
        content["method"],
        content["seed"],
        content["fingerprint"],
        content["metrics"],
        content["columns"],
        None if features is None else (features, labels),
    )


def partition(
    features: NDArray[Any],
    labels: NDArray[Any] | None = None,
    *,
    speeds: Sequence[float],
    method: str = "auto",
    seed: int = 0,
    refine_s: float = 0.0,
    columns: int | None = None,
    tell: Tell = lambda what, share: None,
) -> ShardPlan:
    """Divide samples into shards sized by speed, balanced by class, and alike in feature space.

    Args:
        features: a matrix, one row per sample.
        labels: classes, numbers to be binned, or a 0/1 matrix; without them clusters stand in for classes.
        speeds: of the parts.
        method: `auto`, `balanced`, `exact`, `stratified`, `contiguous`, `random`, `rcd`, `rcd-cut`.
        seed: of what is drawn; the same seed gives the same plan.
        refine_s: seconds to spend on swaps afterwards.
        columns: look at so many principal components of the features only; for raw inputs.
        tell: called with what is being done, and how much of it is done.

    Raises:
        ConfigError: what cannot be divided, and why.
    """
    weights = shares(speeds)
    features = np.asarray(features)
    labels = None if labels is None else np.asarray(labels)
    _check(features, labels, len(speeds))
    name = chosen(method, len(features))
    if columns is not None and columns < 1:
        raise ConfigError(f"columns must be at least 1; got {columns}")
    tell("features", 0.0)
    ready = _ready(features, columns)
    classes = strata(labels, ready, len(speeds), np.random.default_rng((seed, 0)))
    quota = quotas(np.bincount(classes).tolist(), weights)
    random = np.random.default_rng((seed, 1))
    tell(name, 0.1)
    parts = divide(name, ready, classes, quota, random)
    if refine_s > 0:
        begun = time.monotonic()

        def more(rounds: int) -> bool:
            spent = time.monotonic() - begun
            tell("swaps", min(0.95, 0.7 + 0.25 * spent / refine_s))
            return spent < refine_s

        parts, _ = refine(ready, classes, parts, len(speeds), random, more)
    tell("quality", 0.95)
    metrics = _metrics(ready, classes, parts, quota, seed)
    tell("done", 1.0)
    return ShardPlan(
        parts,
        classes,
        quota,
        tuple(map(float, speeds)),
        name,
        seed,
        fingerprint(features, labels),
        metrics,
        columns,
        (features, labels),
    )


def fingerprint(features: NDArray[Any], labels: NDArray[Any] | None) -> str:
    """A short digest of shape, labels, and at most 4096 rows spread over the data."""
    rows = np.unique(np.linspace(0, len(features) - 1, min(len(features), _PROBED)).astype(np.int64))
    digest = hashlib.sha256(f"{features.shape} {features.dtype}".encode())
    digest.update(np.ascontiguousarray(features[rows]).tobytes())
    if labels is not None:
        digest.update(np.ascontiguousarray(labels).tobytes())
    return digest.hexdigest()[:16]


def _ready(features: NDArray[Any], columns: int | None) -> Floats:
    """Columns on a common scale; or fewer ones, as long as they are: a later component counts for less."""
    if columns is not None and columns < features.shape[1]:
        return principal(features, columns)
    return standardised(features)


def _metrics(ready: Floats, classes: Ints, parts: Ints, quota: Ints, seed: int) -> dict[str, float]:
    return {
        "class_error": float(class_error(classes, parts, quota)),
        "class_total_variation": total_variation(classes, parts, quota.shape[1]),
        "mmd_ratio": mmd_ratio(ready, classes, parts, quota.shape[1], seed),
        "wasserstein_ratio": wasserstein_ratio(ready, parts, quota.shape[1], seed),
    }


def _check(features: NDArray[Any], labels: NDArray[Any] | None, num_parts: int) -> None:
    if features.ndim != 2 or features.dtype.kind not in "fiub":
        raise ConfigError(
            f"features must be a matrix of numbers, a row per sample; got shape {features.shape} of {features.dtype}. "
            f"Flatten images, or use a model's penultimate layer"
        )
    if len(features) < num_parts:
        raise ConfigError(f"there must be at least one sample per part: got {len(features)} for {num_parts} parts")
    if labels is not None and len(labels) != len(features):
        raise ConfigError(f"labels must be as many as features: got {len(labels)} and {len(features)}")
    if labels is not None and labels.ndim > 2:
        raise ConfigError(f"labels must be a vector, or a 0/1 matrix for several per sample; got shape {labels.shape}")
    if features.dtype.kind == "f":
        for begin in range(0, len(features), 65536):
            bad = np.flatnonzero(~np.isfinite(features[begin : begin + 65536]).all(axis=1))
            if len(bad):
                raise ConfigError(
                    f"features must be finite: row {begin + int(bad[0])} holds NaN or infinity. Repair or drop it"
                )


def _write(path: Path, data: bytes) -> None:
    half = path.with_name(path.name + ".part")
    try:
        with half.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
        raise
