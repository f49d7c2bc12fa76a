"""What one worker's own file says: how its steps went, when it began and ended."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from paceline.report.follow import Follower
from paceline.report.series import Series

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
_MARKS = 256  # moments that all workers share, kept for their clocks
_SHARED = 64  # of them that count
_STRIDE = 64  # at first, between those that are kept of a long run
_RECENT = 64  # steps kept one by one
_FAR = 10**7  # steps; no run leaves out so many
_WAITING = 1024  # `steps` events taken in at once
_STEP = ("samples", "data_wait_s", "compute_s", "comm_s", "optimizer_s")
_COLUMNS = ("step", *_STEP)


@dataclass
class Marks:
    """Moments by number: the newest, and some of all before, the same numbers for every worker."""

    newest: dict[int, float] = field(default_factory=dict)
    spread: dict[int, float] = field(default_factory=dict)
    stride: int = _STRIDE

    def add(self, number: int, when: float) -> None:
        """One more; between those of which the number is a multiple of 64 some may be left out."""
        self.newest[number] = when
        if len(self.newest) > _MARKS:
            del self.newest[next(iter(self.newest))]
        if number % self.stride == 0:
            self.spread[number] = when
            if len(self.spread) > _MARKS:
                self.stride *= 2
                self.spread = {one: at for one, at in self.spread.items() if one % self.stride == 0}

    def apart(self, other: Marks) -> float | None:
        """How far these are ahead of another's, on the median of the newest that both have; None if they have none."""
        mine, theirs = self.spread | self.newest, other.spread | other.newest
        shared = sorted(mine.keys() & theirs.keys())[-_SHARED:]
        return statistics.median(mine[one] - theirs[one] for one in shared) if shared else None


@dataclass
class Worker:
    """One worker, from its own file.

    Args:
        rank: its number.
        follower: reads the file.
        start: its first event.
        steps: means of samples, data wait, compute, communication and optimizer times.
        recent: its newest steps, each (step, at, samples, data, compute, communication, optimizer).
        marks: when sums arrived, or rounds ended, by its own clock.
        last_t: when it wrote last.
        last_step: the newest step it tells of.
        ok: how it ended; None while it has not.
        dropped: events it could not write.
        attempt: the mark of the time the run has begun; the same for all workers, one of its own each time.
        starts: how often it began, as far as its files tell.
        pause_s: the longest time between two of its events.
        began: when it did so last.
        first_t: when it did so first.
        before_s: seconds it had run before that.
        waiting: `steps` events that `settle` takes in.
        again: it has begun, and told of no step since.
    """

    rank: int
    follower: Follower | None = None
    start: dict[str, Any] = field(default_factory=dict)
    steps: Series = field(default_factory=lambda: Series(len(_STEP)))
    recent: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    marks: Marks = field(default_factory=Marks)
    last_t: float = 0.0
    last_step: int = -1
    ok: bool | None = None
    dropped: int = 0
    attempt: float = 0.0
    starts: int = 0
    pause_s: float = 0.0
    began: float = 0.0
    first_t: float = 0.0
    before_s: float = 0.0
    waiting: list[dict[str, Any]] = field(default_factory=list)
    again: bool = False
    _skipped: bool = False

    @property
    def name(self) -> str:
        """As people call it."""
        host = self.start.get("host")
        return shown(f"{self.rank} ({host}, {self.start.get('device')})") if host else str(self.rank)

    @property
    def seconds(self) -> float:
        """How long it has run, by its own clock; pauses between a stop and a resume left out."""
        return self.before_s + max(0.0, self.last_t - self.began)

    def begin(self, event: dict[str, Any], local: bool) -> None:
        """It begins, or begins again."""
        self.settle(local)
        t, told = _moment(event), float(event.get("attempt") or self.starts + 1)  # older files do not tell
        if not math.isfinite(told):
            raise ValueError(told)
        self.before_s = self.seconds if self.starts else 0.0
        self.first_t = self.first_t if self.starts else t
        self.starts, self.start, self.ok, self.began, self.last_t = self.starts + 1, event, None, t, t
        self.attempt, self.marks, self.again = told, Marks(), True

    def heard(self, event: dict[str, Any]) -> None:
        """It wrote something.

        Raises:
            ValueError: at no moment that can be.
        """
        t, early = _moment(event), self.follower is not None and self.follower.early
        if self.last_t and not early and not self._skipped:
            self.pause_s = max(self.pause_s, t - self.last_t)
        self._skipped = early  # between what was passed over and the next there is no pause
        self.last_t = max(self.last_t, t)

    def add(self, event: dict[str, Any]) -> bool:
        """A `steps` event, which waits: many are taken in at once, as that is several times faster; whether it is time to `settle`.

        Raises:
            ValueError: its columns differ in length.
        """
        if len({len(event[name]) for name in _COLUMNS}) != 1:
            raise ValueError("columns of different lengths")
        self.waiting.append(event)
        return len(self.waiting) >= _WAITING

    def settle(self, local: bool) -> None:
        """Take in the steps that wait.

        Args:
            local: whether the run trains locally, so that the end of a step is no moment that all share.
        """
        events, self.waiting = self.waiting, []
        if not events:
            return
        try:
            self._take(events, local)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            for event in events:  # one of them is damaged
                try:
                    self._take([event], local)
                except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
                    if self.follower is not None:
                        self.follower.damaged += 1

    def _take(self, events: list[dict[str, Any]], local: bool) -> None:
        columns = [list(chain.from_iterable(event[name] for event in events)) for name in _COLUMNS]
        table = np.array(columns, dtype=np.float64).T
        if any("round_s" in event for event in events):
            rounds = [event.get("round_s") or [0.0] * len(event["step"]) for event in events]
            table[:, 1 + _STEP.index("comm_s")] += np.array(list(chain.from_iterable(rounds)), dtype=np.float64)
        if not np.isfinite(table[:, 0]).all():
            raise ValueError("a step that is no number")
        table = table[np.isfinite(table).all(axis=1)]
        newest, num_newest = [], 0
        for event in reversed(events):
            first, count = int(event["step"][0]) if event["step"] else 0, len(event["step"])
            if num_newest < _MARKS or -first % _STRIDE < count:
                newest.append(step_rows(event))
                num_newest += count
        rows = [row for part in reversed(newest) for row in part]
        if not len(table):
            return
        if self.again:
            self.steps.cut(int(table[0, 0]))
            self.again, self.last_step = False, -1
        elif table[:, 0].max() > self.last_step + _FAR:
            raise ValueError("a step that cannot come next")
        self.steps.extend(table[:, 0], table[:, 1:])
        self.last_step = max(self.last_step, int(table[:, 0].max()))
        self.recent.extend(rows[-_RECENT:])
        if not local:
            for step, at, _, *phases in rows:
                self.marks.add(int(step), at + sum(phases[:3]))


def _moment(event: dict[str, Any]) -> float:
    t = float(event.get("t") or 0.0)
    if not math.isfinite(t):
        raise ValueError(t)
    return t


def step_rows(event: dict[str, Any]) -> list[tuple[float, ...]]:
    """The steps of a `steps` event: (step, at, samples, data, compute, communication, optimizer) each; damaged ones are left out.

    Where nothing says when a step began, those before an event's time follow each other without a pause.
    """
    lists = {name: event[name] for name in _STEP}
    if rounds := event.get("round_s"):  # replicas are waited for after the optimizer; shown with the other exchange
        lists["comm_s"] = [a if None in (a, b) else a + b for a, b in zip(lists["comm_s"], rounds, strict=True)]
    rows = list(zip(event["step"], *lists.values(), strict=True))
    whole = [all(value is not None for value in row) for row in rows]
    times: Any = event.get("at")
    if not _known(times, len(rows)):
        times, end = [], float(event["t"])
        for row, there in zip(reversed(rows), reversed(whole), strict=True):
            end -= sum(row[2:]) if there else 0.0
            times.insert(0, end)
    made, end = [], -math.inf
    for at, row, there in zip(times, rows, whole, strict=True):
        if there:
            begin = max(float(at), end)  # a GPU begins later than its host has asked
            end = begin + sum(row[2:])
            made.append((row[0], begin, *row[1:]))
    return made


def _known(times: Any, count: int) -> bool:
    """Whether these are the moments at which steps began; a loop that is not told them writes zeros."""
    right = isinstance(times, list) and len(times) == count and all(isinstance(at, (int, float)) for at in times)
    return right and any(times)


def shown(text: str) -> str:
    """A text without what would steer a terminal, on one line.

    >>> shown("a\\x1b[2Jb\\nc")
    'a [2Jb c'
    """
    return _CONTROL.sub(" ", text)
