"""The record of a run: one JSON-lines file per worker. Everything that draws or prints reads these and nothing else.

Every line is an object with `type` and `t` (seconds since the epoch, on the writer's clock).

| type | when | fields |
|---|---|---|
| `start` | once, first | `schema`, `rank`, `size`, `host`, `pid`, `device`, `backend`, `versions`, `config`, `sources` |
| `data` | a loader is made | `length`, `fingerprint`, `batch_size`, `steps_per_epoch`, `horizon`, `limits` |
| `plan` | every decision | `step` (decided at), `start` (holds from), `split`, `changed`, `reason`, `predicted_s`, `digest` |
| `window` | times were gathered | `step`, `epoch`, `observation`; per worker: `step_s`, `comm_s`; `samples_per_s`, `efficiency` |
| `steps` | with each window | own steps: `step`, `samples`, `data_wait_s`, `compute_s`, `comm_s`, `optimizer_s` (lists) |
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
| `note` | anything said once | `text` |
| `end` | last | `step`, `ok` |
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import ConfigError
from paceline.types import to_plain

SCHEMA = 1
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
        "note",
        "end",
    ]
)


class EventLog:
    """Appends events to a file, a line at a time, each flushed; without a path it keeps nothing.

    Args:
        path: the file, made with its folders; None for no log.
        clock: seconds since the epoch.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._file: TextIO | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"the run folder must be writable: cannot write {path} ({error.strerror}). "
                    f"Choose another with --run-dir or run_dir="
                ) from error

    def write(self, type_: str, **fields: Any) -> None:
        """Append one event."""
        assert type_ in TYPES, type_
        if self._file is None:
            return
        line = json.dumps(_finite({"type": type_, "t": self._clock(), **to_plain_fields(fields)}))
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None


def to_plain_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Dataclasses among the fields as plain values."""
    return {name: to_plain(value) for name, value in fields.items()}


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
    """The events of a file, in order; a last line cut off by a crash is left out.

    Raises:
        ConfigError: the file was written by a newer schema, or a line before the last is damaged.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            event: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise ConfigError(f"{path}, line {number} is not JSON: {error.msg}") from None
        if event.get("type") == "start" and event["schema"] > SCHEMA:
            raise ConfigError(
                f"{path} has event schema {event['schema']}, this paceline reads up to {SCHEMA}: update paceline"
            )
        yield event


def events_path(run_dir: Path, rank: int) -> Path:
    """Where worker `rank` writes its events."""
    return run_dir / "events" / f"worker-{rank:04d}.jsonl"
