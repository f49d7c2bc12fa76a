"""The live page, in a real browser: elements are there, numbers are those of the events, updates arrive; and who may not look does not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.events import SCHEMA, EventLog, events_path
from tests.runs import steps, window, write_run

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARTEFACTS = os.environ.get("PACELINE_ARTEFACTS")


@contextmanager
def dashboard(*arguments):
    """The command itself, on a port of its own choice; its address."""
    command = [sys.executable, "-m", "paceline.cli", "dashboard", "--port", "0", *map(str, arguments)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = server.stderr.readline()
        address = re.search(r"http://\S+", line)
        assert address, line + server.stderr.read()
        yield address[0]
    finally:
        server.terminate()
        server.wait(20)
        server.stderr.close()


def get(address, headers=None):
    request = urllib.request.Request(address, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), dict(error.headers)


def until(address, ready):
    """The runs as the server tells them, once `ready(run)`."""
    for _ in range(100):
        runs = json.loads(get(address + "api/runs")[1])["runs"]
        if runs and ready(runs[0]):
            return runs
        time.sleep(0.1)
    raise AssertionError(runs)


def test_what_it_tells_and_what_it_refuses(tmp_path):
    run = write_run(tmp_path / "run", [8, 24], [0.1, 0.3])
    (tmp_path / "secret").write_text("do not read")
    with dashboard(run) as address:
        status, page, headers = get(address)
        assert status == 200
        assert "paceline" in page
        assert "default-src 'none'" in headers["content-security-policy"]
        (told,) = until(address, lambda one: one["figures"]["steps"] == 40)
        assert told["figures"]["samples_per_s"] == pytest.approx(32 / 0.31, rel=1e-3)
        for path in ("static/../../../secret", "static/%2e%2e%2fsecret", "..%2f..%2fsecret", "static/secret", "secret"):
            status, body, _ = get(address + path)
            assert status == 404
            assert "do not read" not in body
        assert get(address + "api/steps?run=0&from=x&to=2")[0] == 400
        assert get(address + "api/steps?run=7&from=0&to=2")[0] == 400
        assert get(address + "api/steps?run=-1&from=0&to=2")[0] == 400
        chart = json.loads(get(address + "api/steps?run=0&from=3&to=5")[1])["chart"]
        assert sorted(set(chart["lines"][1]["steps"])) == [3, 4, 5]
        assert chart["lines"][1]["x"][0] == pytest.approx(97.0)
        assert json.loads(get(address + "api/steps?run=0&from=0&to=100000")[1])["chart"] is None
        assert get(address, {"Host": "evil.example"})[0] == 403  # a page elsewhere that points its name at us
        port = re.search(r":(\d+)/", address)[1]
        used = subprocess.run(
            [sys.executable, "-m", "paceline.cli", "dashboard", str(run), "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert used.returncode == 2
        assert re.search(rf"port {port} cannot be used .*--port \d+ is free", used.stderr)


def test_beyond_this_machine_it_asks_for_a_token(tmp_path):
    run = write_run(tmp_path, [8, 8], [0.1, 0.2])
    with dashboard(run, "--host", "0.0.0.0") as address:
        base, token = address.split("?token=")
        base = base.replace("0.0.0.0", "127.0.0.1")
        for path in ("", "api/runs", "static/page.js"):
            assert get(base + path)[0] == 401
            assert get(base + path, {"Authorization": "Bearer wrong"})[0] == 401
            assert get(base + path, {"Authorization": f"Bearer {token}"})[0] == 200
        jar = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with jar.open(f"{base}?token={token}", timeout=20) as answer:  # the address that was printed
            assert answer.status == 200
            assert "token" not in answer.url
    nobody = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "dashboard", str(run), "--host", "203.0.113.7"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "host must be an address of this machine" in nobody.stderr


@pytest.fixture
def browser():
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        made = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


def kept(page, name):
    if ARTEFACTS:
        Path(ARTEFACTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(ARTEFACTS) / name, full_page=True)


def outside(page):
    """Addresses beyond this machine that a page asked for, and errors it made."""
    found = []
    page.on(
        "request",
        lambda request: (
            None if re.match(r"(http://127\.0\.0\.1|file:|data:|blob:)", request.url) else found.append(request.url)
        ),
    )
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    return found


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("lab")
def test_the_page_in_a_browser(tmp_path, browser):
    evil = "<img src=x onerror=document.title='broken'>"
    run = write_run(tmp_path / "run", [8, 24], [0.1, 0.3], ends=False, name=evil)
    other = write_run(tmp_path / "other", [16, 16], [0.1, 0.3])
    with dashboard(run, other) as address:
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        wrong = outside(page)
        page.goto(address)
        page.wait_for_selector("article >> nth=1")
        page.wait_for_selector(".js-plotly-plot .main-svg")
        assert page.locator("article").count() == 2
        assert page.locator("article >> nth=0 >> h2").inner_text() == "run"
        ids = page.locator("article >> nth=0 >> section.chart").evaluate_all(
            "all => all.map((one) => one.dataset.chart)"
        )
        assert {"speed", "lanes", "phases", "step-time", "split", "loss"} <= set(ids)
        row = page.locator("article >> nth=0 >> table.workers tbody tr >> nth=1").inner_text().split("\t")
        assert row[1:4] == ["24.0", "80", "2.0 ms"]
        assert evil in row[0]  # as text
        assert page.title() == "paceline"
        speeds = page.evaluate("document.querySelector('[data-chart=speed] .plot').data[0].y")
        assert speeds == [pytest.approx(32 / 0.31, rel=1e-3)] * 10
        assert page.locator(".plot").first.get_attribute("role") == "img"
        assert "Samples per second" in page.locator(".plot").first.get_attribute("aria-label")

        log = EventLog(events_path(run, 0), clock=lambda: 2000.0)  # the run goes on
        log.write("steps", **steps(40, 4, 8, 0.002, 0.097, 0.21, 0.001, 1500.0))
        log.write("window", **window(43, [8, 24], [0.1, 0.3]))
        log.write("batch", step=44, start=44, total=64, before=32, reason=f"noise {evil}", noise=80.0)
        log.close()
        page.wait_for_selector("article[data-step='44']", timeout=20000)
        page.wait_for_selector("text=batch 32 to 64")

        page.get_by_label("filter decisions").first.fill("noise")
        rows = page.locator("article >> nth=0 >> .decisions tbody tr")
        assert rows.count() == 1
        assert "noise <img" in rows.first.inner_text()
        page.get_by_label("kind of decision").first.select_option("plan")
        assert rows.count() == 0

        page.locator("#from").fill("3")  # the keyboard's zoom
        page.locator("#to").fill("6")
        page.locator("#to").press("Enter")
        page.keyboard.press("Tab")
        page.wait_for_selector("article >> nth=0 >> [data-chart=steps] .main-svg")
        assert page.evaluate("document.querySelector('[data-chart=split] .plot').layout.xaxis.range") == [3, 6]
        page.locator("article >> nth=0 >> section.chart >> nth=0 >> summary").press("Enter")
        page.wait_for_selector(
            "article >> nth=0 >> section.chart >> nth=0 >> details table"
        )  # opening tells of itself later
        assert page.locator("article >> nth=0 >> section.chart >> nth=0 >> details table tbody tr").count() >= 10

        page.emulate_media(color_scheme="dark")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.emulate_media(color_scheme="light")
        assert dark != page.evaluate("getComputedStyle(document.body).backgroundColor")
        kept(page, "dashboard.png")
        assert page.title() == "paceline"
        assert wrong == []


@pytest.mark.timeout(120)
@pytest.mark.xdist_group("lab")
def test_a_report_opens_from_disk(tmp_path, browser):
    from paceline.report.page import page as made
    from paceline.report.run import Run

    run = Run(write_run(tmp_path / "run", [8, 24], [0.1, 0.3]))
    run.update()
    path = tmp_path / "report.html"
    path.write_text(made([run]))
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    wrong = outside(page)
    page.goto(path.as_uri())
    page.wait_for_selector(".js-plotly-plot .main-svg")
    assert "run has ended: 2 workers, 40 steps" in page.locator(".words").inner_text()
    assert "balance='affine' would save" in page.locator(".advice").inner_text()
    kept(page, "report.png")
    assert wrong == []


def test_what_cannot_be_read_is_said_and_the_rest_goes_on(tmp_path):
    fine, newer = write_run(tmp_path / "fine", [8, 8], [0.1, 0.2]), write_run(tmp_path / "newer", [8, 8], [0.1, 0.2])
    path = events_path(newer, 0)
    path.write_text(path.read_text().replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}'))
    with dashboard(newer, fine) as address:
        runs = until(address, lambda one: one["figures"]["status"] == "unreadable")
        assert "update paceline" in runs[0]["figures"]["words"][0]
        runs = until(address, lambda one: True)
        assert runs[1]["figures"]["steps"] == 40


def test_ctrl_c_ends_it_without_false_alarm(tmp_path):
    run = write_run(tmp_path, [8, 8], [0.1, 0.2])
    command = [sys.executable, "-m", "paceline.cli", "dashboard", "--port", "0", str(run)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = server.stderr.readline()
    assert get(re.search(r"http://\S+", line)[0])[0] == 200
    server.send_signal(signal.SIGINT)
    _, rest = server.communicate(timeout=30)
    assert server.returncode == 0
    assert "stopped" not in rest
    assert "Traceback" not in rest
