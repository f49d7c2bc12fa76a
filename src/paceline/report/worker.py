"""What one worker's own file says: how its steps went, when it began and ended."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from paceline.report.follow import Follower
from paceline.report.series import Series

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_MARKS = 256  # moments that all workers share, kept for their clocks
_RECENT = 64  # steps kept one by one
_WAITING = 1024  # `steps` events taken in at once
_STEP = ("samples", "data_wait_s", "compute_s", "comm_s", "optimizer_s")
_COLUMNS = ("step", *_STEP)


@dataclass
class Marks:
    """Moments by number: the newest."""

    at: dict[int, float] = field(default_factory=dict)

    def add(self, number: int, when: float) -> None:
        """One more."""
        self.at[number] = when
        if len(self.at) > _MARKS:
            del self.at[next(iter(self.at))]


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
        starts: how often it began.
        began: when it did so last.
        first_t: when it did so first.
        before_s: seconds it had run before that.
        waiting: `steps` events that `settle` takes in.
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
    starts: int = 0
    began: float = 0.0
    first_t: float = 0.0
    before_s: float = 0.0
    waiting: list[dict[str, Any]] = field(default_factory=list)

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
        t = float(event["t"])
        self.before_s = self.seconds if self.starts else 0.0
        self.first_t = self.first_t if self.starts else t
        self.starts, self.start, self.ok, self.began, self.last_t = self.starts + 1, event, None, t, t
        self.marks = Marks()

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
        if not np.isfinite(table[:, 0]).all():
            raise ValueError("a step that is no number")
        table = table[np.isfinite(table).all(axis=1)]
        newest: list[tuple[float, ...]] = []
        for event in reversed(events):
            newest[:0] = step_rows(event)
            if len(newest) >= _MARKS:
                break
        if not len(table):
            return
        self.steps.extend(table[:, 0], table[:, 1:])
        self.last_step = max(self.last_step, int(table[:, 0].max()))
        self.recent.extend(newest[-_RECENT:])
        if not local:
            for step, at, _, *phases in newest[-_MARKS:]:
                self.marks.add(int(step), at + sum(phases[:3]))


def step_rows(event: dict[str, Any]) -> list[tuple[float, ...]]:
    """The steps of a `steps` event: (step, at, samples, data, compute, communication, optimizer) each; damaged ones are left out.

    Where nothing says when a step began, those before an event's time follow each other without a pause.
    """
    rows = list(zip(event["step"], *(event[name] for name in _STEP), strict=True))
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
