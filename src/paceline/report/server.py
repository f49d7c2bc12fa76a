"""The live page: a small server on this machine that reads event files and sends what has changed.

It answers fixed addresses from memory and never opens a file that a request names. On loopback a request that comes under another name
than this machine's own is refused, so that no page elsewhere can read along; on any other address a token is asked for.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import threading
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.report.page import of_run, plotly, static
from paceline.report.run import Run
from paceline.report.steps import places, spans

EVERY_S = 1.0  # between two looks at the files
FRAME_S = 2.0  # between two messages to a browser
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; frame-ancestors 'none'"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>paceline</title>
<link rel="stylesheet" href="static/page.css">
<script id="plotly" src="static/plotly.js" async></script>
<script src="static/page.js" defer></script>
<script src="static/live.js" defer></script>
</head>
<body>
<a class="skip" href="#runs">to the runs</a>
<header><h1>paceline</h1><span id="state" class="dim" role="status">reading</span><span id="clock" class="dim"></span></header>
<main><div id="tools"></div><div class="runs" id="runs"></div></main>
</body>
</html>
"""


class Watcher:
    """Reads the runs on a thread of its own, and keeps what pages show of them.

    Args:
        runs: what to show.
    """

    def __init__(self, runs: list[Run]) -> None:
        self.runs, self.version = runs, 0
        self._states: list[str] = []
        self.text = json.dumps({"runs": []})
        self.lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="paceline-dashboard", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Read no more."""
        self._over.set()
        self._thread.join(10)

    def _work(self) -> None:
        while not self._over.is_set():
            pause = self.look()
            self._over.wait(0.0 if pause == 0.0 else EVERY_S)

    def look(self, budget_s: float = 1.0) -> float:
        """Take in what is new, for at most so long; the seconds to wait before the next look."""
        changed = False
        with self.lock:
            for run in self.runs:
                if run.problem:
                    continue
                try:
                    changed |= run.update(budget_s)
                except OSError:
                    continue  # a disk over the network, say: the next look may find it again
                except Exception as error:  # whatever is in the files: the page says so, and the other runs go on
                    run.problem = str(error) or type(error).__name__
            behind = any(run.read_share < 0.999 and not run.problem for run in self.runs)
            states = [run.status() for run in self.runs]
        if changed or states != self._states or not self.version:
            self._states = states
            self._tell()
        return 0.0 if behind and changed else EVERY_S

    def steps(self, run: Run, first: int, last: int) -> dict[str, Any] | None:
        """A closer look."""
        with self.lock:
            look = places(run, first, last)
        return spans(look, first, last)

    def _tell(self) -> None:
        told = []
        with self.lock:
            for place, run in enumerate(self.runs):
                try:
                    shown = of_run(run)
                except Exception as error:
                    run.problem = f"what its events say makes no sense ({type(error).__name__}: {error})"
                    shown = of_run(run)
                told.append({**shown, "place": place, "read_share": run.read_share})
        self.text = json.dumps({"runs": _short(told)}, separators=(",", ":"))
        self.version += 1


def _short(value: Any) -> Any:
    """Numbers to five digits: what a screen shows of them; none for what is no number, as JSON has no word for it."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.5g}") if abs(value) < 1e9 else value
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return value


class Guard(BaseHTTPMiddleware):
    """Lets in who may: under this machine's own name, and with the token where there is one."""

    def __init__(self, app: Any, names: set[str], token: str | None, cookie: str) -> None:
        super().__init__(app)
        self._names, self._token, self._cookie = names, token, cookie

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Look at one request."""
        if self._names and request.url.hostname not in self._names:
            return PlainTextResponse("this server answers under its own name only", 403)
        given = request.query_params.get("token")
        if self._token is not None:
            if given is not None and secrets.compare_digest(given.encode(), self._token.encode()):
                answer: Response = RedirectResponse(request.url.path, 303)
                answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
                return answer
            known = request.cookies.get(self._cookie, "") or request.headers.get("authorization", "").removeprefix(
                "Bearer "
            )
            if not secrets.compare_digest(known.encode(), self._token.encode()):
                return PlainTextResponse("a token is needed: open the address that `paceline dashboard` printed", 401)
        response = await call_next(request)
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response


def application(watcher: Watcher, *, names: set[str], token: str | None, port: int = 0) -> Starlette:
    """The server's addresses.

    Args:
        watcher: what it shows.
        names: under which it may be called; empty for any.
        token: asked for, if there is one.
        port: where it listens; cookies are told apart by it.
    """
    kinds = {"page.js": "text/javascript", "live.js": "text/javascript", "page.css": "text/css"}
    kept = {name: (static(name), kind) for name, kind in kinds.items()} | {"plotly.js": (plotly(), "text/javascript")}

    one_at_a_time = asyncio.Lock()

    async def page(_: Request) -> Response:
        return Response(_PAGE, media_type="text/html")

    async def file(request: Request) -> Response:
        found = kept.get(request.path_params["name"])
        if found is None:
            return PlainTextResponse("there is no such file", 404)
        return Response(found[0], media_type=found[1], headers={"Cache-Control": "max-age=60"})

    async def runs(_: Request) -> Response:
        return Response(watcher.text, media_type="application/json")

    async def steps(request: Request) -> Response:
        try:
            place, first, last = (int(request.query_params[name]) for name in ("run", "from", "to"))
            run = watcher.runs[place] if place >= 0 else None
        except (KeyError, ValueError, IndexError):
            run = None
        if run is None:
            return PlainTextResponse("run, from and to must be whole numbers", 400)
        async with one_at_a_time:  # each reads files
            chart = await asyncio.to_thread(watcher.steps, run, first, last)
        return JSONResponse({"chart": _short(chart)})

    async def live(request: Request) -> Response:
        return StreamingResponse(
            _stream(request, watcher), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    routes = [
        Route("/", page),
        Route("/static/{name}", file),
        Route("/api/runs", runs),
        Route("/api/steps", steps),
        Route("/api/live", live),
    ]
    made = Starlette(routes=routes)
    made.add_middleware(Guard, names=names, token=token, cookie=f"paceline-token-{port}")
    return made


async def _stream(request: Request, watcher: Watcher) -> AsyncIterator[str]:
    sent, quiet = 0, 0.0
    while not await request.is_disconnected():
        if watcher.version != sent:
            sent, quiet = watcher.version, 0.0
            yield f"event: runs\ndata: {watcher.text}\n\n"
            await asyncio.sleep(FRAME_S)
        else:
            await asyncio.sleep(0.2)
            quiet += 0.2
            if quiet >= 15:
                quiet = 0.0
                yield ": still here\n\n"
