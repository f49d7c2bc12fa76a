"""The record of a run: one JSON-lines file per worker. Everything that draws or prints reads these and nothing else.

Every line is an object with `type` and `t` (seconds since the epoch, on the writer's clock). A thread writes them, so that a slow disk
never holds up a step: what finds its queue full is dropped and counted. A file that has grown to a quarter of what a run may take is
left and the next begun, `worker-0000.1.jsonl`, `.2` and so on, with what a reader needs to begin there; the first and the newest three
are kept. What all workers know alike, `window` and a `plan` that changes nothing, is written by the first worker of every machine and by
worker 1, so that one file that is lost takes nothing with it and many workers do not write the same many times.

| type | when | fields |
|---|---|---|
| `start` | first, and again at a resume | `schema`, `rank`, `size`, `attempt` (alike on all workers, later is greater), `policies` (names), `host`, `pid`, `device`, `backend`, `versions`, `config`, `sources` |
| `data` | a loader is made | `length`, `fingerprint`, `batch_size`, `steps_per_epoch`, `horizon`, `limits` |
| `plan` | every decision | `step` (decided at), `start` (holds from), `split`, `changed`, `reason`, `predicted_s`, `digest` |
| `window` | times were gathered | `step`, `epoch`, `observation`; per worker: `step_s`, `comm_s`, `waiting_s`; `exchange_s`, `samples_per_s`, `efficiency` |
| `steps` | with each window | own steps: `step`, `at` (when the loop asked for the batch), `samples`, `data_wait_s`, `compute_s`, `comm_s`, `optimizer_s`, `round_s` (waiting for other replicas after the step) (lists) |
| `topology` | once, after `start` | `names` of nodes, `members` of each |
| `shards` | owned shards are cut anew | `step`, `epoch`, `moved` samples, `fewest` there could be, `sizes`, `reason` |
| `dissimilarity` | asked for | `step`, `zeta2`, `square`, `ratio` |
| `batch` | the global batch changes | `step` (decided at), `start` (holds from), `total`, `before`, `reason`, `noise` (scale, in samples) |
| `lr` | a rule changes the learning rate with the batch | `step`, `rule`, `factor`, `batch`, `first` (batch the rate was chosen for), `noise` |
| `sync` | the sync policy changes its pace | `step`, `policy`, `reason`, `state` |
| `round` | an exchange was taken in | `step`, `span` of values, `every`, `delay`, `transfer_s`, `waited_s`, `num_bytes` sent to other nodes, `step_s`, `drift`, `weights` |
| `left-out` | a replica did not count | `step`, `replicas`, `reason` |
| `loss` | an epoch ends and losses were reported | `epoch`, `step`, `loss` (this worker's mean), `samples` |
| `epoch` | an epoch ends | `epoch`, `step`, `samples` |
| `memory` | out of memory, recovered | `step`, `samples`, `fits`, `micro_batches` |
| `state` | saved or loaded | `action`, `path`, `step`, `note` |
| `evaluate` | after an evaluation | the sums and `count` |
| `straggler` | a worker has fallen behind | `step`, `worker`, `phase`, `since` (step), `ratio` to before, `confidence`, `text` |
| `note` | anything said once | `text` |
| `end` | last | `step`, `ok`, `dropped` (events) |
"""

from __future__ import annotations

import dataclasses
import json
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.types import to_plain

SCHEMA = 1
MOST_BYTES = 256 * 2**20  # of one worker's files
_WAITING = 4096  # events that may wait for the disk
_KEPT = 4  # files of a worker
_TOGETHER = 256  # lines written at once
HEAD = ("start", "topology", "data")  # said again at the beginning of every file
_DRAIN_S = 10.0
TYPES = frozenset(
    [
        "start",
        "topology",
        "data",
        "plan",
        "window",
        "steps",
        "shards",
        "dissimilarity",
        "batch",
        "lr",
        "sync",
        "round",
        "left-out",
        "loss",
        "epoch",
        "memory",
        "state",
        "evaluate",
        "straggler",
        "note",
        "end",
    ]
)


class EventLog:
    """Appends events to a file, a line at a time, from a thread of its own; without a path it keeps nothing.

    Args:
        path: the file, made with its folders; None for no log.
        clock: seconds since the epoch.
        most_bytes: what a worker's files may take together.
        sinks: told of every event as well, each on a thread of its own.
        tells: whether this worker keeps what all know alike (windows, and plans that change nothing); some do, so that files stay small.

    Attributes:
        dropped: events that found the queue full, or the disk.
    """

    def __init__(
        self,
        path: Path | None,
        clock: Callable[[], float] = time.time,
        *,
        most_bytes: int = MOST_BYTES,
        sinks: Sequence[Callable[[dict[str, Any]], None]] = (),
        tells: bool = True,
    ) -> None:
        self.path, self.dropped, self._tells = path, 0, tells
        self._clock, self._part_bytes = clock, most_bytes // _KEPT
        self._queue: queue.Queue[dict[str, Any] | threading.Event | None] = queue.Queue(_WAITING)
        self._file: FileIO | None = None
        self._pending: list[bytes] = []  # lines for it
        self._torn = False
        self._head: dict[str, bytes] = {}
        self._part = self._size = self._told = self._failed = 0
        self._why = ""
        self._thread: threading.Thread | None = None
        if path is not None:
            self._part = max((number for number, _ in parts(path)), default=0)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open()
            except OSError as error:
                raise ConfigError(
                    f"the run folder must be writable: cannot write {path} ({error.strerror}). "
                    f"Choose another with --run-dir or run_dir="
                ) from error
        self._sinks = [_Teller(sink, self) for sink in sinks]
        if path is not None or self._sinks:
            self._thread = threading.Thread(target=self._work, name="paceline-events", daemon=True)
            self._thread.start()

    @property
    def wanted(self) -> bool:
        """Whether anybody keeps events."""
        return self._thread is not None

    @property
    def tells(self) -> bool:
        """Whether what all workers know alike is kept here too."""
        return self._tells and self.wanted

    def write(self, type_: str, **fields: Any) -> None:
        """Append one event; never waits, but for the last."""
        assert type_ in TYPES, type_
        if self._thread is None:
            return
        event = {"type": type_, "t": self._clock(), **fields}
        try:
            if type_ == "end":
                self._queue.put(event, timeout=_DRAIN_S)
            else:
                self._queue.put_nowait(event)
        except queue.Full:
            self.dropped += 1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush(self, timeout_s: float = _DRAIN_S) -> bool:
        """Wait until everything written so far is in the file; whether that came about in time."""
        if self._thread is None:
            return True
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self) -> None:
        """Write what is waiting and close the file; later events are dropped."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._queue.put(None, timeout=_DRAIN_S)
            thread.join(_DRAIN_S)
        except queue.Full:
            pass  # the disk does not answer: training has ended, and shall not hang on it

    def _work(self) -> None:
        while True:
            event = self._queue.get()
            if event is None:
                break
            asked = event if isinstance(event, threading.Event) else None
            if not isinstance(event, threading.Event):
                self._keep(event)
            if asked or self._queue.empty() or len(self._pending) >= _TOGETHER:
                self._put()
            if self._queue.empty():
                self._admit()
            if asked:
                asked.set()
        for teller in self._sinks:
            teller.close()
            if teller.lost:
                self._say(f"{teller.name} was not told of {teller.lost} events: it is too slow")
        self._put()
        self._admit()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _keep(self, event: dict[str, Any]) -> None:
        """Neither a full disk nor an event that cannot be written is a reason to end a run, or this thread."""
        try:
            self._take(event)
        except Exception as error:
            self._lose(1, error)

    def _lose(self, count: int, error: Exception) -> None:
        self.dropped += count
        self._failed += count
        self._why = f"{type(error).__name__}: {error}"

    def _put(self, *, counted: bool = True) -> bool:
        """Write what waits; what the disk does not take is lost, and counted. Never a buffer beneath: it would lose without a word."""
        if self._file is None or not self._pending:
            return True
        lines, self._pending = self._pending, []
        data, done = b"\n" * self._torn + b"".join(lines), 0
        try:
            while done < len(data):
                done += self._file.write(data[done:])
            self._torn = False
        except OSError as error:
            if counted:
                self._lose(len(lines) - max(0, data[:done].count(b"\n") - self._torn), error)
            self._torn = data[done - 1 : done] != b"\n" if done else self._torn
            return False
        return True

    def _admit(self) -> None:
        """Say what was dropped, and why."""
        if self.dropped > self._told:
            fast = self.dropped - self._failed
            said = [f"{fast} came faster than they could be kept"] if fast else []
            said += [f"{self._failed} could not be written ({self._why})"] if self._failed else []
            if self._say(f"{self.dropped} events were dropped: {', '.join(said)}"):
                self._told = self.dropped

    def _say(self, text: str) -> bool:
        """A note; whether the disk took it."""
        self._take({"type": "note", "t": self._clock(), "text": text})
        return self._put(counted=False)

    def _take(self, event: dict[str, Any]) -> None:
        text = _text(event)
        if self._sinks:
            plain = json.loads(text)
            for teller in self._sinks:
                teller.tell(plain)
        if self._file is None:
            return
        line = text.encode() + b"\n"
        if event["type"] in HEAD:
            self._head[event["type"]] = line
        elif self._size + len(line) > self._part_bytes:
            self._turn_over()
        self._pending.append(line)
        self._size += len(line)

    def _open(self) -> None:
        """Go on at the end of a file; a line that a crash has torn ends there."""
        assert self.path is not None
        place = part_path(self.path, self._part)
        self._torn = False
        if place.exists() and place.stat().st_size:
            with place.open("rb") as file:
                file.seek(-1, 2)
                self._torn = file.read(1) != b"\n"
        self._file = place.open("ab", buffering=0)
        self._size = place.stat().st_size

    def _turn_over(self) -> None:
        """Go on in the next file; in the old one, where the next cannot be made."""
        assert self._file is not None
        assert self.path is not None
        self._put()  # whoever reads on in the next file has seen all of this one
        try:
            following = part_path(self.path, self._part + 1).open("ab", buffering=0)
        except OSError:
            self._size = 0  # tries again after as much
            return
        old, self._file = self._file, following
        self._part += 1
        self._pending = [self._head[name] for name in HEAD if name in self._head]
        self._size, self._torn = sum(map(len, self._pending)), False
        with suppress(OSError):
            old.close()
        for number, path in parts(self.path):
            if 0 < number <= self._part - (_KEPT - 1):
                path.unlink(missing_ok=True)


class _Teller:
    """Tells somebody else of events, on a thread of its own: theirs is no pace to depend on."""

    def __init__(self, sink: Callable[[dict[str, Any]], None], log: EventLog) -> None:
        self._sink, self._log, self.lost = sink, log, 0
        self.name = getattr(sink, "__name__", type(sink).__name__)
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name="paceline-sink", daemon=True)
        self._thread.start()

    def tell(self, event: dict[str, Any]) -> None:
        """One more event, if there is room."""
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.lost += 1  # they are slow; the file has it

    def close(self) -> None:
        """Let it finish, for a while."""
        try:
            self._queue.put(None, timeout=_DRAIN_S / 2)
            self._thread.join(_DRAIN_S / 2)
        except queue.Full:
            pass

    def _work(self) -> None:
        failed = False
        while (event := self._queue.get()) is not None:
            if failed:
                continue  # nobody waits for the queue
            try:
                self._sink(event)
            except Exception as error:  # somebody else's code: it is left alone from now on
                failed = True
                self._log.write("note", text=f"{self.name} is told no more: {type(error).__name__}: {error}")


def _text(event: dict[str, Any]) -> str:
    """An event as JSON; where a number is not finite, the slow way."""
    try:
        return json.dumps(event, allow_nan=False, default=_shallow)
    except ValueError:
        return json.dumps(_finite({name: to_plain(value) for name, value in event.items()}))


def _shallow(value: Any) -> Any:
    """A dataclass as a dict of its fields; whatever else, as `to_plain` has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return to_plain(value)


def _finite(value: Any) -> Any:
    """JSON has no NaN: None stands for a number that is not there."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a worker, in order, from all its files; a line cut off by a crash, the last of all or before a new start, is left out.

    Raises:
        ConfigError: the file was written by a newer schema, or another line is damaged.
    """
    damaged = ""
    for number, name in parts(path) or [(0, path)]:
        with name.open(encoding="utf-8") as file:
            for line_number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    event = parsed(line, name)
                except json.JSONDecodeError as error:
                    damaged = damaged or f"{name}, line {line_number} is not JSON: {error.msg}"
                    continue
                if number and event["type"] in HEAD and line_number <= len(HEAD):
                    continue  # said before
                if damaged and event["type"] != "start":  # else a crash tore it, and the run has begun again
                    raise ConfigError(damaged)
                damaged = ""
                yield event


def parsed(line: str, path: Path) -> dict[str, Any]:
    """One line as an event.

    Raises:
        ConfigError: it was written by a newer schema.
    """
    event: dict[str, Any] = json.loads(line)
    if event.get("type") == "start" and event["schema"] > SCHEMA:
        raise ConfigError(
            f"{path} has event schema {event['schema']}, this paceline reads up to {SCHEMA}: update paceline"
        )
    return event


def events_path(run_dir: Path, rank: int) -> Path:
    """Where worker `rank` writes its events."""
    return run_dir / "events" / f"worker-{rank:04d}.jsonl"


def part_path(path: Path, number: int) -> Path:
    """The `number`-th file of a worker.

    >>> part_path(Path("worker-0003.jsonl"), 2).name
    'worker-0003.2.jsonl'
    """
    return path.with_name(f"{path.stem}.{number}{path.suffix}") if number else path


def parts(path: Path) -> list[tuple[int, Path]]:
    """The files of a worker that are there, with their numbers, oldest first."""
    pattern = re.compile(re.escape(path.stem) + r"(?:\.(\d+))?" + re.escape(path.suffix))
    if not path.parent.is_dir():
        return []
    found = [(match, file) for file in path.parent.iterdir() if (match := pattern.fullmatch(file.name))]
    return sorted((int(match[1] or 0), file) for match, file in found)
