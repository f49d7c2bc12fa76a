"""The plain values that policies, runtime, lab and reports hand to each other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError

NO_CAP = 2**40  # larger than any batch; sums over workers stay exact


@dataclass(frozen=True, slots=True)
class Limits:
    """What every split of a global batch must respect.

    Args:
        lower: fewest samples worker i takes in a step.
        cap: most samples worker i takes in a step (`NO_CAP` where there is none).
        granularity: splits are multiples of this many samples, the remainder of the total apart.
    """

    lower: tuple[int, ...]
    cap: tuple[int, ...]
    granularity: int = 1
    lower_array: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    cap_array: NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lower_array", np.array(self.lower, np.int64))
        object.__setattr__(self, "cap_array", np.array(self.cap, np.int64))

    @classmethod
    def of(
        cls,
        num_workers: int,
        *,
        lower: int = 1,
        cap: int | tuple[int | None, ...] | None = None,
        granularity: int = 1,
    ) -> Limits:
        """Limits for `num_workers` workers; `cap` is one number for all, or one (or None) for each."""
        caps = cap if isinstance(cap, tuple) else (cap,) * num_workers
        if len(caps) != num_workers:
            raise ConfigError(
                f"max_local_batch must be one number or one per worker: got {len(caps)} numbers for "
                f"{num_workers} workers"
            )
        for value in caps:
            if value is not None and value < 1:
                raise ConfigError(f"max_local_batch must be at least 1, got {value}")
        if lower < 1:
            raise ConfigError(f"min_local_batch must be at least 1, got {lower}")
        if granularity < 1:
            raise ConfigError(f"granularity must be at least 1, got {granularity}")
        return cls(
            lower=(lower,) * num_workers,
            cap=tuple(NO_CAP if value is None else value for value in caps),
            granularity=granularity,
        )

    @property
    def num_workers(self) -> int:
        """How many workers the split is for."""
        return len(self.lower)

    @property
    def room(self) -> int:
        """The largest total that fits, in whole multiples of the granularity on every worker."""
        g = self.granularity
        return min(int((self.cap_array // g * g).sum()), NO_CAP)

    def check(self, total: int) -> None:
        """Raise if no split of `total` respects the limits."""
        low, cap = self.lower_array, self.cap_array
        if (low > cap).any():
            worker = int(np.argmax(low > cap))
            raise ConfigError(
                f"min_local_batch must not exceed max_local_batch: worker {worker} has {low[worker]} > {cap[worker]}"
            )
        if total > self.room:
            rule = "max_local_batch"
            if self.granularity > 1:
                rule += f" in multiples of granularity={self.granularity}"
            raise ConfigError(
                f"{rule} leaves room for {self.room} samples a step over {self.num_workers} workers, the "
                f"global batch is {total}: {total - self.room} too many. Lower batch_size to {self.room}, or "
                f"raise max_local_batch"
            )


@dataclass(frozen=True, slots=True)
class Observation:
    """What a window of steps looked like on every worker; all a balance policy may see.

    Args:
        step: the number of the last step in the window.
        epoch: the epoch of that step.
        ends_epoch: whether that step was the last one of its epoch.
        total: the global batch B that the next plan divides.
        limits: the bounds on the split.
        samples: batch b_i at which `busy_s[i]` was seen; 0 where worker i told nothing.
        busy_s: typical (median) time of worker i from the moment the last sum arrived until its own
            gradients were ready: optimizer + data wait + compute, communication left out.
        noise_s: standard error of `busy_s[i]`; 0 where unknown.
        wall_s: mean over the window of the same interval (outliers included).
        compute_s: mean over the window of forward + backward alone.
        num_steps: steps in the window.
    """

    step: int
    epoch: int
    ends_epoch: bool
    total: int
    limits: Limits
    samples: tuple[float, ...]
    busy_s: tuple[float, ...]
    noise_s: tuple[float, ...]
    wall_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """A split of the global batch and why it was chosen.

    Args:
        split: samples for each worker; sums to the total exactly.
        reason: one sentence for people.
        predicted_s: predicted time of the slowest worker, where the policy has a model.
    """

    split: tuple[int, ...]
    reason: str
    predicted_s: float | None = None


T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and numbers as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value


def from_plain(template: T, data: Any) -> T:
    """Rebuild what `to_plain` wrote, in the types of `template`.

    >>> limits = Limits.of(2, cap=8)
    >>> from_plain(limits, to_plain(limits)) == limits
    True
    """
    if dataclasses.is_dataclass(template) and not isinstance(template, type):
        if not isinstance(data, dict):
            raise ConfigError(f"expected the fields of {type(template).__name__}, got {type(data).__name__}")
        names = [f.name for f in dataclasses.fields(template) if f.init]
        if sorted(data) != sorted(names):
            raise ConfigError(f"expected fields {sorted(names)} of {type(template).__name__}, got {sorted(data)}")
        return type(template)(**{n: from_plain(getattr(template, n), data[n]) for n in names})
    if isinstance(template, np.ndarray):
        return np.array(data, dtype=template.dtype)  # type: ignore[return-value]
    if isinstance(template, tuple):
        inner = template[0] if template else None
        return tuple(from_plain(inner, item) for item in data)  # type: ignore[return-value]
    return data  # type: ignore[no-any-return]
