"""Environments for the libraries that paceline is compared with.

Every peer lives in a virtual environment of its own, so that their requirements do not meet. All share the torch of the
running interpreter, by a `.pth` file that adds its site-packages after the peer's own: a fair comparison, and no second copy
of a huge package. pip is held to that torch by a constraint, so a peer that wants another one fails instead of fetching it.

    root/
    ├── accelerate/               the environment
    │   └── paceline-peer.json    written last: what it was made for
    └── accelerate.lock           held while it is being made

An environment whose stamp is missing (its making was interrupted) or differs (requirements, Python or torch have changed) is
made anew.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import re
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import PacelineError, unknown_name

PEERS: dict[str, tuple[str, ...]] = {
    "accelerate": ("accelerate==1.15.0",),
    "fabric": ("lightning-fabric==2.6.6",),
    # It imports requests and pkg_resources without asking for them; setuptools 84 no longer has the latter.
    "adaptdl": ("adaptdl==0.2.11", "requests==2.34.2", "setuptools==79.0.1"),
    "torchft": ("torchft==0.2.0",),
}

_STAMP = "paceline-peer.json"
_PIP_TIMEOUT_S = 600.0
_TAIL_LINES = 8

# Prints a JSON object: distribution -> version, or null where there is none.
_ASK_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


class PeerMissing(PacelineError):
    """A peer's environment cannot be made.

    Args:
        name: the peer.
        reason: what went wrong; the end of pip's output if it was pip.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot make the environment of {name}: {reason}")
        self.name, self.reason = name, reason


def environment(name: str, root: Path) -> Path:
    """The Python of a peer's environment, which is made the first time.

    Args:
        name: a key of `PEERS`.
        root: folder for all environments.

    Returns:
        The path of its executable.

    Raises:
        ConfigError: there is no such peer.
        PeerMissing: it cannot be installed here.
    """
    requirements = _requirements(name)
    try:
        return _environment(name, root, requirements)
    except (OSError, subprocess.SubprocessError, importlib.metadata.PackageNotFoundError) as error:
        raise PeerMissing(name, f"{type(error).__name__}: {error}") from error


def _environment(name: str, root: Path, requirements: tuple[str, ...]) -> Path:
    home = root.absolute() / name
    python = home / "bin" / "python"
    stamp = {
        "requirements": list(requirements),
        "torch": importlib.metadata.version("torch"),
        "python": sys.version,
        "shared": _shared_folders(),
    }
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{name}.lock"):
        if _stamp_of(home) != stamp:
            shutil.rmtree(home, ignore_errors=True)
            try:
                _make(name, home, python, requirements)
            except BaseException:
                shutil.rmtree(home, ignore_errors=True)
                raise
            (home / _STAMP).write_text(json.dumps(stamp, indent=1), encoding="utf-8")
    return python


def versions(name: str, python: Path) -> dict[str, str]:
    """Versions of a peer, of what it was pinned with, and of torch, as its own Python sees them."""
    wanted = [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in _requirements(name)]
    return {
        found: version for found, version in _ask_versions(python, [*wanted, "torch"]).items() if version is not None
    }


def _requirements(name: str) -> tuple[str, ...]:
    if name not in PEERS:
        raise unknown_name("peer", name, PEERS)
    return PEERS[name]


def _make(name: str, home: Path, python: Path, requirements: tuple[str, ...]) -> None:
    # pip comes with the shared folders too, if the running interpreter has one; that saves seconds.
    venv.create(home, with_pip=importlib.util.find_spec("pip") is None, symlinks=True)
    packages = next(home.glob("lib/python*/site-packages"))
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in _shared_folders()]
    (packages / "paceline-shared.pth").write_text("".join(lines), encoding="utf-8")

    torch = importlib.metadata.version("torch")
    seen = _ask_versions(python, ["torch"])["torch"]
    if seen != torch:  # pip would now download one
        raise PeerMissing(name, f"it must share torch {torch} of {sys.executable}, but sees {seen}")
    constraints = home / "constraints.txt"
    constraints.write_text(f"torch=={torch}\n", encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    command += ["--constraint", str(constraints), *requirements]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise PeerMissing(
            name, f"pip did not end within {_PIP_TIMEOUT_S:g} s: is the package index within reach?"
        ) from None
    if done.returncode:
        tail = "\n".join(done.stdout.strip().splitlines()[-_TAIL_LINES:])
        raise PeerMissing(name, f"pip ended with {done.returncode}:\n{tail}")


def _shared_folders() -> list[str]:
    """Site-packages of the running interpreter."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [folder for folder in folders if Path(folder).is_dir()]


def _stamp_of(home: Path) -> object:
    try:
        return json.loads((home / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _ask_versions(python: Path, names: list[str]) -> dict[str, str | None]:
    command = [str(python), "-c", _ASK_VERSIONS, *names]
    answer: dict[str, str | None] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return answer


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go when the file is closed, also if this process is killed
        yield
