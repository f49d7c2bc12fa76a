from __future__ import annotations

import json

import pytest

from paceline import events
from paceline.errors import ConfigError
from paceline.events import SCHEMA, TYPES, EventLog, events_path, read
from paceline.types import Limits


def test_written_and_read_back(tmp_path):
    path = events_path(tmp_path / "run", 3)
    log = EventLog(path, clock=lambda: 12.5)
    log.write("start", schema=SCHEMA, rank=3)
    log.write("plan", split=(1, 2), limits=Limits.of(2), predicted_s=float("nan"))
    log.close()
    log.write("end", step=1, ok=True)  # dropped
    start, plan = read(path)
    assert start == {"type": "start", "t": 12.5, "schema": SCHEMA, "rank": 3}
    assert plan["split"] == [1, 2]
    assert plan["predicted_s"] is None
    assert plan["limits"]["lower"] == [1, 1]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"type": "note", "t": 1, "text": "a"}\n{"type": "no')
    assert [event["text"] for event in read(path)] == ["a"]
    path.write_text('{"type": "no\n{"type": "note", "t": 1, "text": "a"}\n')
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        list(read(path))


def test_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text(json.dumps({"type": "start", "schema": SCHEMA + 1}) + "\n")
    with pytest.raises(ConfigError, match="update paceline"):
        list(read(path))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run folder must be writable"):
        EventLog(tmp_path / "file" / "events.jsonl")


def test_every_type_is_documented():
    table = {line.split("`")[1] for line in events.__doc__.splitlines() if line.startswith("| `")}
    assert table == TYPES
