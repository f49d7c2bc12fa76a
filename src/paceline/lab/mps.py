"""The `mps` mechanism: shares of one NVIDIA GPU, through a CUDA MPS daemon of the lab's own.

The daemon lives in a private folder, so that it meets no daemon of anybody else; one that is already running for another is
left alone. A process takes part through two environment variables and says its share in a third, before it starts CUDA.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from paceline.errors import ConfigError
from paceline.lab.owner import owner_alive, tag

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"


def gpu_name() -> str | None:
    """The first NVIDIA GPU of this machine; None if there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    if listed.returncode or "GPU 0" not in listed.stdout:
        return None
    return listed.stdout.splitlines()[0].split(":", 1)[1].split("(UUID")[0].strip()


def probe() -> tuple[bool, str]:
    """Whether a GPU can be shared here, and a sentence: how, or what is missing and what to do."""
    name = gpu_name()
    if name is None:
        return False, "no NVIDIA GPU (nvidia-smi is missing or shows none): use mechanism 'paced' or 'cgroup'"
    if shutil.which(CONTROL) is None:
        return False, f"{CONTROL} is not on the path: install the driver's MPS tools (Debian: nvidia-cuda-mps)"
    others = foreign()
    beside = f"; {len(others)} MPS process(es) of others run and are left alone" if others else ""
    return True, f"shares of one {name} by CUDA MPS{beside}"


def daemons() -> dict[int, str]:
    """Every MPS process that can be seen and lives, with its pipe folder ("" for the default, or if it may not be read)."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            named = (folder / "comm").read_text().startswith("nvidia-cuda-mps")
            if not named or (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
        except OSError:
            continue
        try:
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            variables = []
        found[int(folder.name)] = next((one.partition("=")[2] for one in variables if one.startswith(f"{PIPES}=")), "")
    return found


def foreign() -> list[int]:
    """MPS processes that no lab started."""
    return [pid for pid, pipe in daemons().items() if owner_alive(Path(pipe).parent.name) is None]


class Daemon:
    """An MPS daemon in a private folder, for as long as the context lasts."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.gettempdir()) / f"{tag()}-mps"

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment to take part."""
        return {PIPES: str(self._folder / "pipe"), LOGS: str(self._folder / "log")}

    def __enter__(self) -> Daemon:
        works, sentence = probe()
        if not works:
            raise ConfigError(f"mechanism 'mps' needs an NVIDIA GPU with MPS: {sentence}")
        for place in self.env.values():
            Path(place).mkdir(parents=True, exist_ok=True)
        os.chmod(self._folder, 0o700)
        try:
            command = [CONTROL, "-d"]
            started = subprocess.run(
                command, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=60
            )
            if started.returncode:
                said = (started.stdout + started.stderr).strip()[:500]
                raise ConfigError(f"the MPS daemon did not start: {said}")
        except subprocess.TimeoutExpired:
            stop(self._folder)
            raise ConfigError("the MPS daemon did not start within 60 s: look at nvidia-smi") from None
        except BaseException:
            stop(self._folder)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop(self._folder)


def stop(folder: Path, patience_s: float = 10.0) -> None:
    """Stop the daemon of a lab's folder and remove the folder: asked first, then by signal."""
    pipe = str(folder / "pipe")

    def mine() -> list[int]:
        return [pid for pid, place in daemons().items() if place == pipe]

    def wait_s(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while mine() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not mine()

    if mine():
        environment = {**os.environ, PIPES: pipe, LOGS: str(folder / "log")}
        try:
            subprocess.run(
                [CONTROL], input="quit\n", env=environment, text=True, capture_output=True, timeout=patience_s
            )
        except subprocess.TimeoutExpired:
            pass
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            for pid in mine() if number else []:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass
            if wait_s(patience_s / 3):
                break
    shutil.rmtree(folder, ignore_errors=True)


def clean() -> list[str]:
    """Stop the daemons that a lab left whose launcher is gone."""
    left = [place for place in Path(tempfile.gettempdir()).glob("*-mps") if owner_alive(place.name) is False]
    for place in left:
        stop(place)
    return [str(place) for place in left]
