"""Four times a step: data wait, compute, exposed communication, optimizer.

    fetch            batch              gradients ready        sum arrived           optimizer done
      |-- data wait ---|------ compute ------|--- communication ---|----- optimizer -----|

Compute ends when the last bucket of gradients is ready, not when the sum arrives: the sum waits for the slowest worker
and would make every worker look equally slow. On the CPU a mark is a clock reading. On CUDA it is an event recorded in
the stream and read only once it has passed, a step later as a rule: the loop never synchronises with the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What one step cost this worker, and where gradients are measured what they were like.

    `parts` are (samples, squared norm, inner product with the joint gradient) of what this worker computed, `joint` the squared norm
    of the joint gradient. `at` is when the loop asked for the batch, in seconds since the epoch by the host's clock. `round_s` is what local
    training waited for other replicas after the step.
    """

    step: int
    samples: int
    data_wait_s: float
    compute_s: float
    comm_s: float
    optimizer_s: float
    full: bool = True
    finite: bool = True
    parts: tuple[tuple[float, float, float], ...] = ()
    joint: float = math.nan
    at: float = 0.0
    round_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Everything but communication."""
        return self.data_wait_s + self.compute_s + self.optimizer_s


class CpuClock:
    """Marks are readings of a clock.

    Args:
        now: seconds, from any origin.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.mark: Callable[[], float] = now

    def passed(self, mark: float) -> bool:
        """A reading has always passed."""
        return True

    def between(self, start: float, end: float) -> float:
        """Seconds from start to end."""
        return end - start


class CudaClock:
    """Marks are events in the current stream.

    Args:
        device: whose stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event behind everything queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has reached it."""
        return bool(mark.query())

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds from start to end on the device."""
        return float(start.elapsed_time(end)) / 1e3


@dataclass(slots=True)
class _Marks:
    step: int
    samples: int
    full: bool
    fetch: Any
    batch: Any
    at: float
    ready: Any = None
    summed: Any = None
    updated: Any = None
    agreed: Any = None
    held_s: float = 0.0
    closed: Any = None
    norms: list[torch.Tensor] = field(default_factory=list)
    joints: list[torch.Tensor] = field(default_factory=list)
    inners: list[torch.Tensor] = field(default_factory=list)
    parts: Any = None
    updated_once: bool = False


class Meter:
    """Takes the marks of each step and turns them into `StepTimes`.

    Usable by itself: call `fetch` before asking for a batch, `batch` when it is there, `ready` and `summed` around the
    communication, `updated` after the optimizer, and collect finished steps with `take`.

    Args:
        device: decides the clock.
        clock: another clock, for tests.
    """

    def __init__(self, device: torch.device | None = None, clock: Any = None) -> None:
        cuda = device is not None and device.type == "cuda"
        self._clock = clock or (CudaClock(device) if cuda and device else CpuClock())
        self._fetch: Any = None
        self._at = self._held_s = 0.0
        self._open: _Marks | None = None
        self._waiting: list[_Marks] = []

    def fetch(self) -> None:
        """The loop asks for a batch: the step before is over."""
        self._fetch, self._at = self._clock.mark(), time.time()
        if self._open is not None:
            self._open.closed = self._fetch
            self._waiting.append(self._open)
            self._open = None

    def batch(self, step: int, samples: int, *, full: bool = True) -> None:
        """The batch is there; `full` is False for the short last one of an epoch."""
        mark = self._clock.mark()
        self._open = _Marks(
            step, samples, full, self._fetch if self._fetch is not None else mark, mark, self._at or time.time()
        )
        self._open.held_s, self._held_s = self._held_s, 0.0

    def ready(self) -> None:
        """The last gradients are ready to be sent."""
        if self._open is not None:
            self._open.ready = self._clock.mark()
            self._open.norms = _on_host(self._open.norms)

    def summed(self) -> None:
        """The sum over all workers has arrived."""
        if self._open is not None:
            self._open.summed = self._clock.mark()

    def updated(self) -> None:
        """The optimizer has made its step."""
        if self._open is not None:
            self._open.updated = self._clock.mark()
            self._open.updated_once = True

    def held(self, seconds: float) -> None:
        """So long the next batch was not waited for but the other workers, for what they have to tell."""
        self._held_s += seconds

    def agreed(self) -> None:
        """Other replicas were waited for, as far as local training does so."""
        if self._open is not None:
            self._open.agreed = self._clock.mark()

    def norm(self, value: torch.Tensor) -> None:
        """The norm of a part of this worker's own gradient; only whether it is finite is used here."""
        if self._open is not None:
            self._open.norms.append(value)

    def gradient(
        self, norms: list[torch.Tensor], inners: list[torch.Tensor], parts: torch.Tensor | None = None
    ) -> None:
        """The joint gradient, in pieces: their norms and their inner products with this worker's own.

        Args:
            norms: of the pieces of the joint gradient.
            inners: of the pieces; may be empty.
            parts: where one worker computed several parts, (samples, squared norm, inner product) of each; else what `norm` was
                told is the one part.
        """
        if self._open is not None:
            self._open.joints, self._open.inners = _on_host(norms), _on_host(inners)
            self._open.parts = None if parts is None else _on_host([parts])[0]

    def drop(self) -> None:
        """Forget the step under way (the loop was left)."""
        self._open, self._fetch, self._at = None, None, 0.0

    def clear(self) -> None:
        """Forget everything."""
        self.drop()
        self._waiting = []

    def take(self) -> list[StepTimes]:
        """The steps that are over and whose marks the device has passed, oldest first."""
        done = []
        while self._waiting and self._clock.passed(self._waiting[0].closed):
            done.append(self._times(self._waiting.pop(0)))
        return done

    def pending(self) -> list[StepTimes]:
        """What `take` would return if everything so far were over, without taking it; waits for the device."""
        marks = [*self._waiting, *([self._open] if self._open is not None and self._open.ready is not None else [])]
        if marks and isinstance(self._clock, CudaClock):
            torch.cuda.synchronize()
        return [self._times(one) for one in marks]

    def _times(self, marks: _Marks) -> StepTimes:
        between = self._clock.between
        ready = marks.ready if marks.ready is not None else marks.closed
        summed = marks.summed if marks.summed is not None else ready
        updated = marks.updated if marks.updated is not None else summed
        data = between(marks.fetch, marks.batch)
        held = min(marks.held_s, max(0.0, data))
        poisoned = marks.updated_once and not all(math.isfinite(float(norm.sum())) for norm in marks.norms)
        return StepTimes(
            step=marks.step,
            samples=marks.samples,
            data_wait_s=data - held,
            compute_s=between(marks.batch, ready),
            comm_s=between(ready, summed),
            optimizer_s=max(0.0, between(summed, updated)),
            full=marks.full,
            finite=not poisoned,
            parts=_parts(marks),
            joint=_squares(marks.joints) if marks.joints else math.nan,
            at=marks.at,
            round_s=held + (max(0.0, between(updated, marks.agreed)) if marks.agreed is not None else 0.0),
        )


def _parts(marks: _Marks) -> tuple[tuple[float, float, float], ...]:
    if marks.parts is not None:
        return tuple((b, square, inner) for b, square, inner in marks.parts.view(-1, 3).tolist())
    if not marks.joints:
        return ()
    if not marks.samples:
        return ((0.0, 0.0, 0.0),)  # an idle worker says so
    inner = total(value for piece in marks.inners for value in piece.view(-1).tolist()) if marks.inners else math.nan
    return ((float(marks.samples), _squares(marks.norms), inner),)


def _squares(norms: list[torch.Tensor]) -> float:
    return total(value * value for norm in norms for value in norm.view(-1).tolist())


def total(values: Iterable[float]) -> float:
    """The exact sum; NaN where it has none, because something is not finite."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


def _on_host(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same numbers where they can be read later without waiting: one copy for all that are on a GPU."""
    on_gpu = [value for value in values if value.device.type == "cuda"]
    if not on_gpu:
        return values
    joined = torch.stack(on_gpu)
    host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
    host.copy_(joined, non_blocking=True)
    return [*(value for value in values if value.device.type != "cuda"), host]
