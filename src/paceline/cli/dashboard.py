"""`paceline dashboard`: runs as a live page in the browser."""

from __future__ import annotations

import secrets
import socket
from importlib.util import find_spec

import click

from paceline.cli.screen import run_folders, say
from paceline.errors import ConfigError


@click.command()
@click.argument("run_dirs", nargs=-1)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0 takes any that is free."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Another address than loopback asks for a token.")
def command(run_dirs: tuple[str, ...], port: int, host: str) -> None:
    """Show runs in the browser, live: who waits, splits, speeds, batches, exchanges, decisions.

    Without RUN_DIRS: the newest run under `runs/`. Works offline; ends with Ctrl-C, and runs do not notice.
    """
    missing = [name for name in ("starlette", "uvicorn", "plotly") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the dashboard needs {', '.join(missing)}: pip install 'paceline[view]'")
    import uvicorn

    from paceline.report.run import runs_in
    from paceline.report.server import LOOPBACK, Watcher, application

    runs = runs_in(run_folders(run_dirs))
    open_socket = _bound(host, port)
    here = host in LOOPBACK
    token = None if here else secrets.token_urlsafe(24)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{open_socket.getsockname()[1]}/" + (f"?token={token}" if token else "")
    watcher = Watcher(runs)
    port = open_socket.getsockname()[1]
    app = application(watcher, names=set(LOOPBACK) if here else set(), token=token, port=port)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, ws="none", lifespan="off")
    )
    watcher.start()
    say(f"dashboard at {address}  (Ctrl-C ends it)")
    try:
        server.run(sockets=[open_socket])
    except KeyboardInterrupt:
        pass  # that is how it ends
    finally:
        watcher.stop()
        open_socket.close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # a port that was closed a moment ago; one that listens stays refused
    try:
        made.bind((host, port))
        made.listen(128)
    except OSError as error:
        made.close()
        with socket.socket(family, socket.SOCK_STREAM) as other:
            try:
                other.bind((host, 0))
            except OSError:
                raise ConfigError(
                    f"host must be an address of this machine: cannot use {host} ({error.strerror})"
                ) from None
            free = other.getsockname()[1]
        raise ConfigError(f"port {port} cannot be used ({error.strerror}): --port {free} is free") from None
    return made
