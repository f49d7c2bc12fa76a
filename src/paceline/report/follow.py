"""The event files of a run, read as they grow, in bounded memory, and whatever state they are in."""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.events import HEAD, parsed, parts

CHUNK = 2**18
INDEX = 2**20  # bytes between two places of an index
LONGEST = 16 * 2**20  # of a line: more is not an event of ours
MOST_WORKERS = 100_000
_NAME = re.compile(r"worker-(\d{1,9})(?:\.\d+)?\.jsonl")
_FREQUENT = tuple(b'{"type": "%s"' % kind for kind in (b"steps", b"window", b"round"))
_PLAN, _KEPT = b'{"type": "plan"', b'"changed": false'
_OPENING = re.compile(rb'\{"type": "([a-z-]+)", "t": [0-9.e+]+, "step": \[?(\d{1,12})[],]')


class Follower:
    """New events of one worker each time they are asked for.

    A line that is not complete yet is kept for later; one that is damaged is passed over and counted. What a further file of the same
    worker repeats of the first is left out.

    Args:
        path: the worker's first file.
        begin: where to begin: the number of a file, and a place in it.
        newest: bytes at the end to read in full; before them, what comes with every few steps is passed over, which costs next to nothing.

    Attributes:
        damaged: lines that could not be read.
        early: whether it is still before the newest bytes.
        place_of_line: the number of the file, and the place in it, of the line read last.
        paused: whether the last reading has left something, for want of time.
        skip: whether an event of this type and (first) step need not be read; it costs less than reading it.
        done: bytes read so far; `size` of how many when last looked.
        index: a place to begin for later steps: (step, file, place), one in a megabyte.
    """

    def __init__(self, path: Path, begin: tuple[int, int] = (-1, 0), newest: int | None = None) -> None:
        self.path, self.damaged, self.paused = path, 0, False
        self._newest, self.early, self._again = newest, False, False
        self._part, self._offset = begin
        self._rest, self._too_long, self._line = b"", False, 1 if begin[1] else 0
        self.skip: Callable[[str, int], bool] | None = None
        self.size, self.done = sum(_size(file) for _, file in parts(path)), 0
        self.index: list[tuple[int, int, int]] = []
        self._next_index, self._latest = 0, -1
        self.place_of_line, self._start = (-1, 0), (None, None)

    def new(self, until: float = math.inf) -> Iterator[dict[str, Any]]:
        """What was written since the last time.

        Args:
            until: a moment of the monotonic clock after which no more than a quarter of a megabyte is read; `paused` says if more is left.
        """
        self.paused = False
        while True:
            later = [(number, file) for number, file in parts(self.path) if number >= self._part]
            if not later:
                return
            self.size = self.done - self._offset + sum(_size(file) for _, file in later)
            if later[0][0] != self._part:  # the first one, or ours is gone, with what was not read of it
                self._begin(later[0][0])
                self.size = self.done + sum(_size(file) for _, file in later)
            yield from self._lines(later[0][1], until)
            if len(later) < 2 or self.paused:
                return
            self._begin(later[1][0])

    def place(self, step: int) -> tuple[int, int]:
        """Where to begin to read about a step."""
        found = bisect_right(self.index, (step, -1, -1)) - 1
        return self.index[found][1:] if found >= 0 else (-1, 0)

    def _begin(self, part: int) -> None:
        self.damaged += bool(self._rest)
        self._part, self._offset, self._rest, self._line, self._next_index = part, 0, b"", 0, 0

    def _lines(self, path: Path, until: float) -> Iterator[dict[str, Any]]:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return
        except PermissionError as error:
            raise ConfigError(f"event files must be readable: cannot read {path} ({error.strerror})") from None
        with file:
            file.seek(self._offset)
            while not self.paused and (data := file.read(CHUNK)):
                at = self._offset - len(self._rest)
                self._offset += len(data)
                self.done += len(data)
                self.early = self._newest is not None and self.size - self.done >= self._newest
                *whole, self._rest = (self._rest + data).split(b"\n")
                for line in whole:
                    self._line, self.place_of_line = self._line + 1, (self._part, at)
                    event = self._event(line, path)
                    if event is not None:
                        if event["type"] == "steps":
                            self._note(event, at)
                        yield event
                    at += len(line) + 1
                if len(self._rest) > LONGEST:
                    self._rest, self._too_long = b"", True
                self.paused = self.done < self.size and time.monotonic() > until

    def _note(self, event: dict[str, Any], at: int) -> None:
        steps = event.get("step")
        if not isinstance(steps, list) or not steps or not isinstance(steps[0], int):
            return
        back, self._latest = steps[0] <= self._latest, steps[0]
        if back or at >= self._next_index:
            while self.index and self.index[-1][0] >= steps[0]:  # the run has gone back
                self.index.pop()
            self.index.append((steps[0], self._part, at))
            self._next_index = at + INDEX

    def _event(self, line: bytes, path: Path) -> dict[str, Any] | None:
        if self._too_long:  # the end of a line that was given up
            self._too_long = False
            self.damaged += 1
            return None
        if not line.strip():
            return None
        if self.early and (line.startswith(_FREQUENT) or (line.startswith(_PLAN) and _KEPT in line)):
            return None
        if self.skip is not None:
            match = _OPENING.match(line)
            if match is not None and self.skip(match[1].decode(), int(match[2])):
                return None
        try:
            event = parsed(line.decode(), path)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            self.damaged += 1
            return None
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            self.damaged += 1
            return None
        if event["type"] in HEAD and self._part > 0 and self._line <= len(HEAD):
            if event["type"] == "start":  # another one than the last: it began anew in a file that is gone
                self._again = (event.get("t"), event.get("pid")) != self._start
            if not self._again:
                return None
        if event["type"] == "start":
            self._start = (event.get("t"), event.get("pid"))
        return event


def workers(folder: Path) -> dict[int, Path]:
    """The first event file of every worker of a run.

    Raises:
        ConfigError: there is no such folder, or it is not a run's.
    """
    if not folder.is_dir():
        raise ConfigError(f"a run folder must exist: there is no {folder}. `paceline run` says where it writes")
    found = {}
    place = folder / "events"
    for file in sorted(place.iterdir()) if place.is_dir() else []:
        match = _NAME.fullmatch(file.name)
        if match and int(match[1]) < MOST_WORKERS and file.is_file():
            found[int(match[1])] = place / f"worker-{match[1]}.jsonl"
    return found


def newest(root: Path) -> Path:
    """The run folder under `root` that was written to last.

    Raises:
        ConfigError: there is none.
    """
    written: dict[Path, float] = {}
    for file in root.glob("*/events/worker-*.jsonl") if root.is_dir() else []:
        place = file.parent.parent
        written[place] = max(written.get(place, 0.0), modified(file))
    if not written:
        raise ConfigError(f"there is no run in {root}: name a run folder, or start one with `paceline run`")
    return max(written, key=lambda place: written[place])


def modified(path: Path) -> float:
    """When a file was written last, by this machine's clock; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
