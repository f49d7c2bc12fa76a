from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

from paceline import events
from paceline.errors import ConfigError
from paceline.events import SCHEMA, TYPES, EventLog, events_path, parts, read
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


def test_files_are_bounded_and_each_can_be_read_alone(tmp_path):
    path = tmp_path / "worker-0000.jsonl"
    log = EventLog(path, most_bytes=8000)
    log.write("start", schema=SCHEMA, rank=0, size=1)
    log.write("data", length=7)
    for number in range(400):
        log.write("note", text=f"number {number}")
    log.close()
    files = parts(path)
    assert len(files) == 4
    assert files[0][1] == path  # how the run began is kept
    assert [number for number, _ in files[1:]] == list(range(files[-1][0] - 2, files[-1][0] + 1))
    assert all(file.stat().st_size <= 2000 for _, file in files)
    for _, file in files:
        assert [json.loads(line)["type"] for line in file.read_text().splitlines()[:2]] == ["start", "data"]
    found = list(read(path))
    assert [event["type"] for event in found[:3]] == ["start", "data", "note"]
    assert [event["type"] for event in found].count("start") == 1
    assert found[-1]["text"] == "number 399"
    again = EventLog(path, most_bytes=8000)  # a resumed run goes on in the newest
    again.write("end", step=1, ok=True)
    again.close()
    assert list(read(path))[-1]["type"] == "end"
    assert parts(path) == files


def test_writing_never_waits_and_what_is_dropped_is_counted(tmp_path):
    """A disk that does not answer: a pipe nobody reads from."""
    os.mkfifo(tmp_path / "e.jsonl")
    reader = os.open(tmp_path / "e.jsonl", os.O_RDONLY | os.O_NONBLOCK)  # or opening it to write would wait
    log = EventLog(tmp_path / "e.jsonl")
    for number in range(9000):
        log.write("note", text=f"{number} " + "x" * 200)
    assert log.dropped > 1000
    assert not log.flush(timeout_s=0.05)
    done, data = threading.Event(), []

    def read_all():
        os.set_blocking(reader, True)
        while chunk := os.read(reader, 2**20):
            data.append(chunk)
        done.set()

    threading.Thread(target=read_all, daemon=True).start()
    assert log.flush()
    log.close()
    assert done.wait(20)
    found = [json.loads(line)["text"] for line in b"".join(data).decode().splitlines()]
    said = [text for text in found if "dropped" in text]
    assert said[-1].startswith(f"{log.dropped} events were dropped")
    assert len(found) - len(said) + log.dropped == 9000
    os.close(reader)


def test_sinks_have_a_pace_of_their_own_and_those_that_fail_are_left_alone(tmp_path):
    seen, gate = [], threading.Event()

    def broken(event):
        raise RuntimeError("no network")

    def slow(event):
        gate.wait(30)
        seen.append(event["type"])

    log = EventLog(tmp_path / "e.jsonl", sinks=[broken, slow])
    for number in range(5000):
        log.write("loss", loss=float(number))
        if number % 1000 == 0:
            assert log.flush()
    assert log.flush()  # the slow one stands still meanwhile
    assert log.dropped == 0
    gate.set()
    log.close()
    assert len(seen) >= 4096
    found = list(read(tmp_path / "e.jsonl"))
    assert len(found) == 5002
    assert re.fullmatch(r"slow was not told of \d+ events: it is too slow", found[-1]["text"])
    assert [event["text"] for event in found[:-1] if event["type"] == "note"] == [
        "broken is told no more: RuntimeError: no network"
    ]
    told = []
    with_sinks_alone = EventLog(None, sinks=[lambda event: told.append(event["loss"])])
    with_sinks_alone.write("loss", loss=3.0)
    with_sinks_alone.close()
    assert told == [3.0]


def test_a_run_goes_on_after_a_torn_line(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"type": "note", "t": 1, "text": "a"}\n{"type": "no')
    log = EventLog(path)
    log.write("start", schema=SCHEMA, rank=0)
    log.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"type": "no'
    assert json.loads(lines[2])["type"] == "start"
    assert [event["type"] for event in read(path)] == ["note", "start"]


def test_what_cannot_be_written_is_counted_and_the_next_is(tmp_path):
    log = EventLog(tmp_path / "e.jsonl")
    log.write("note", text=object())
    log.write("note", text="fine")
    log.close()
    texts = [event["text"] for event in read(tmp_path / "e.jsonl")]
    assert texts[0] == "fine" or "1 events were dropped" in texts[0]
    assert "fine" in texts
    assert log.dropped == 1


def test_where_no_further_file_can_be_made_the_old_one_grows(tmp_path):
    path = tmp_path / "worker-0000.jsonl"
    log = EventLog(path, most_bytes=8000)
    (tmp_path / "worker-0000.1.jsonl").mkdir()
    for number in range(100):
        log.write("note", text=f"number {number}")
    log.close()
    assert len(path.read_text().splitlines()) == 100
    assert log.dropped == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_does_not_end_a_run(tmp_path):
    (tmp_path / "e.jsonl").symlink_to("/dev/full")
    log = EventLog(tmp_path / "e.jsonl")
    for number in range(100):
        log.write("note", text="x" * 1000 + str(number))
    log.close()
    assert log.dropped > 0


def test_a_disk_that_is_full_for_a_while_is_told_of(tmp_path):
    path = tmp_path / "e.jsonl"
    log = EventLog(path)
    log.write("loss", loss=1.0)
    assert log.flush()
    kept = log._file
    with Path("/dev/full").open("ab", buffering=0) as full:
        log._file = full
        for number in range(20):  # one by one, as a run writes them
            log.write("loss", loss=float(number))
            assert log.flush()
        assert log.dropped == 20
        log._file = kept
    log.write("loss", loss=2.0)
    log.close()
    found = list(read(path))
    assert [event["loss"] for event in found if event["type"] == "loss"] == [1.0, 2.0]
    notes = [event["text"] for event in found if event["type"] == "note"]
    assert notes == ["20 events were dropped: 20 could not be written (OSError: [Errno 28] No space left on device)"]


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
