"""What looking costs: events in a training loop, and a large run in a browser."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP_S = 0.05
WORKERS, STEPS, EVERY = 64, 100_000, 4
LONGEST_STEPS = 300_000


def events() -> list[str]:
    """What events cost a step of 50 ms, for 4 and 64 workers: in the thread that trains, and with the thread that writes."""
    import numpy

    from paceline.events import EventLog
    from paceline.policies.balance.window import COLUMNS, observe
    from paceline.runtime.lookout import told_of
    from paceline.types import Limits

    lines = [
        "### Events, per step of 50 ms",
        "",
        "| workers | µs in the training thread | of a step | µs of all threads | of a step | bytes a step |",
        "|---|---|---|---|---|---|",
    ]
    count, every = 2000, 4
    for size in (4, 64):
        with tempfile.TemporaryDirectory() as folder:
            log, spent = EventLog(Path(folder) / "worker-0000.jsonl"), []
            times = 0.05 + 0.01 * numpy.random.default_rng(1).random((size, every, len(COLUMNS)))
            times[:, :, 0], times[:, :, -1] = 16, range(every)
            seen = observe(times, step=0, epoch=0, ends_epoch=False, total=16 * size, limits=Limits.of(size))
            cpu = time.process_time()
            for first in range(0, count, every):
                begun = time.perf_counter()
                columns = {name: times[0, :, place].tolist() for place, name in enumerate(COLUMNS)}
                columns["step"] = list(range(first, first + every))
                log.write("steps", at=[1.7e9 + first] * every, **columns)
                log.write("window", **told_of(times, seen))
                reason = "kept: a change would gain less than what is asked for, " + "x" * 40
                log.write(
                    "plan",
                    step=first,
                    start=first,
                    split=[16] * size,
                    changed=False,
                    reason=reason,
                    predicted_s=0.05,
                    digest=1,
                )
                spent.append((time.perf_counter() - begun) / every)
                time.sleep(0.002)  # steps are longer; the writer has its turn
            log.close()
            whole = (time.process_time() - cpu) / count
            weight = sum(file.stat().st_size for file in Path(folder).iterdir()) / count
            cost = statistics.median(spent)
            lines.append(
                f"| {size} | {cost * 1e6:.1f} | {cost / STEP_S:.3%} | {whole * 1e6:.1f} | {whole / STEP_S:.3%} | {weight:.0f} |"
            )
    return lines


def large(folder: Path, num_steps: int) -> float:
    """A run of 64 workers on 8 nodes, written as the runtime would; how many megabytes it takes."""
    from paceline.events import events_path

    draw = random.Random(1)
    busy = [0.04 + 0.0001 * rank + draw.random() / 1e5 for rank in range(WORKERS)]
    slowest = max(busy)
    config = {"balance": "affine", "sync": "allreduce", "batch": "constant"}
    seen = dict.fromkeys(("busy_s", "noise_s", "wall_s", "compute_s"), busy)
    limits = {"lower": [1] * WORKERS, "cap": [2**31] * WORKERS, "granularity": 1}
    windows = {
        "epoch": 0,
        "observation": {"ends_epoch": False, "total": 1024, "limits": limits, "samples": [16.0] * WORKERS, **seen},
        "step_s": [slowest + 0.005 + draw.random() / 1e5 for _ in busy],
        "comm_s": [slowest - one + 0.005 for one in busy],
        "exchange_s": 0.005 + draw.random() / 1e5,
        "waiting_s": [slowest - one for one in busy],
        "samples_per_s": 16 * WORKERS / (slowest + 0.005),
        "efficiency": 0.9 + draw.random() / 1e5,
    }
    reason = "kept: a change would gain 0.1%, less than the 0.5% asked for"
    plans = {"split": [16] * WORKERS, "changed": False, "reason": reason, "predicted_s": slowest, "digest": 123456789}
    window, plan = json.dumps(windows)[1:], json.dumps(plans)[1:]
    for rank in range(WORKERS):
        path = events_path(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        start = {
            "schema": 1,
            "rank": rank,
            "size": WORKERS,
            "host": f"host-{rank // 8}",
            "device": "cpu",
            "config": config,
        }
        parts = ("data_wait_s", "compute_s", "comm_s", "optimizer_s", "round_s")
        shares = (0.02, 0.96, None, 0.02, 0.0)
        times = {
            name: [slowest - busy[rank] + 0.005 if share is None else share * busy[rank]] * EVERY
            for name, share in zip(parts, shares, strict=True)
        }
        same = json.dumps({"samples": [16] * EVERY, **times})[1:]
        tells = rank == 1 or rank % 8 == 0  # the first of every node, and the second of all
        with path.open("w") as file:
            file.write(json.dumps({"type": "start", "t": 0.0, **start}) + "\n")
            for first in range(0, num_steps, EVERY):
                opening = f'"t": {1.7e9 + (first + EVERY) * STEP_S:.6f}, "step": '
                at = [1.7e9 + (first + n) * STEP_S for n in range(EVERY)]
                file.write(f'{{"type": "steps", {opening}{[*range(first, first + EVERY)]}, "at": {at}, {same}\n')
                if tells:
                    file.write(f'{{"type": "window", {opening}{first + EVERY - 1}, {window}\n')
                    file.write(f'{{"type": "plan", {opening}{first + EVERY - 1}, "start": {first}, {plan}\n')
            file.write(
                json.dumps({"type": "end", "t": 1.7e9 + num_steps * STEP_S, "step": num_steps, "ok": True}) + "\n"
            )
    return sum(file.stat().st_size for file in (folder / "events").iterdir()) / 1e6


def browser() -> list[str]:
    """First paint, memory and the time until everything is drawn, of a large run in a real browser."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "large"
        size = large(folder, STEPS)
        command = [sys.executable, "-m", "paceline.cli", "dashboard", "--port", "0", str(folder)]
        server = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            assert server.stderr is not None
            address = re.search(r"http://\S+", server.stderr.readline())
            assert address
            with sync_playwright() as play:
                made = play.chromium.launch(
                    executable_path=chromium, args=["--no-sandbox", "--enable-precise-memory-info"]
                )
                page = made.new_page()
                begun = time.perf_counter()
                page.goto(address[0])
                paint = page.evaluate(
                    "new Promise((done) => new PerformanceObserver((list) => done(list.getEntries()[0].startTime)).observe({type: 'paint', buffered: true}))"
                )
                page.wait_for_selector(f"article[data-step='{STEPS}']", timeout=300_000)
                page.wait_for_selector("#state:has-text('up to date')", timeout=300_000)
                whole = time.perf_counter() - begun
                page.wait_for_selector("[data-chart=lanes] .main-svg")
                page.evaluate("window.gc && gc()")
                heap = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
                again = made.new_page()
                begun = time.perf_counter()
                again.goto(address[0])
                again.wait_for_selector("[data-chart=lanes] .main-svg")
                second = time.perf_counter() - begun
                made.close()
            peak = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())[1]) / 1e3  # type: ignore[index]
        finally:
            server.terminate()
            server.wait(20)
    return [
        f"### {WORKERS} workers, {STEPS} steps ({size:.0f} MB of events) in Chromium",
        "",
        "| first paint | all read and drawn | a second page drawn | memory of the page's scripts | memory of the server |",
        "|---|---|---|---|---|",
        f"| {paint:.0f} ms | {whole:.1f} s | {second:.1f} s | {heap:.0f} MB | {peak:.0f} MB |",
    ]


def viewing() -> list[str]:
    """Both tables."""
    return [*events(), "", *browser()]


def longest() -> list[str]:
    """Ten gigabytes of events: how long a first look takes, and how much memory."""
    lines = ["", "### Ten gigabytes of events", "", "| command | seconds | memory |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "longest"
        size = large(folder, LONGEST_STEPS)
        out = str(Path(place) / "report.html")
        for command in (["watch", "--once"], ["report", "-o", out], ["trace"]):
            begun = time.perf_counter()
            asked = [sys.executable, "-m", "paceline.cli", command[0], str(folder), *command[1:]]
            with subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0, command
            lines.append(
                f"| `paceline {command[0]}` | {time.perf_counter() - begun:.0f} | {used.ru_maxrss / 1e3:.0f} MB |"
            )
    lines[1] = f"### {WORKERS} workers, {LONGEST_STEPS} steps ({size / 1e3:.1f} GB of events)"
    return lines
