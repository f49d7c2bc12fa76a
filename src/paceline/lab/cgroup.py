"""The `cgroup` mechanism: the kernel gives each worker a share of CPU time.

A quota counts all threads of a worker, the network's among them, so the period is short: a long one would stop a worker in
the middle of an exchange for as long as the rest of the period. Version 1 and version 2 differ in where files are and
in what they are called; the rest is the same.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paceline.errors import ConfigError
from paceline.lab.owner import owner_alive, tag

PERIOD_US = 10_000
LEAST_QUOTA_US = 1_000  # the kernel takes no less
BASE = "PACELINE_LAB_CGROUP"  # environment: the folder of this lab's groups


@dataclass(frozen=True)
class Hierarchy:
    """Where groups are made: version 1 or 2, and the folder."""

    version: int
    root: Path


def find(mounts: str) -> Hierarchy | None:
    """The hierarchy with the `cpu` controller, from the text of /proc/self/mounts.

    >>> find("cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0")
    Hierarchy(version=1, root=PosixPath('/sys/fs/cgroup/cpu,cpuacct'))
    """
    for line in mounts.splitlines():
        _, root, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Hierarchy(1, Path(root))
        if kind == "cgroup2":
            controllers = Path(root) / "cgroup.controllers"
            if controllers.exists() and "cpu" in controllers.read_text().split():
                return Hierarchy(2, Path(root))
    return None


def quota(cores: float) -> tuple[int, int]:
    """Microseconds of CPU time, and the period they are given in.

    >>> quota(0.5), quota(0.05)
    ((5000, 10000), (1000, 20000))
    """
    period = max(PERIOD_US, round(LEAST_QUOTA_US / cores))
    return max(LEAST_QUOTA_US, round(cores * period)), period


def writes(hierarchy: Hierarchy, group: Path, cores: float) -> list[tuple[Path, str]]:
    """What to write into which file to give a group that many cores."""
    amount, period = quota(cores)
    if hierarchy.version == 1:
        return [(group / "cpu.cfs_period_us", str(period)), (group / "cpu.cfs_quota_us", str(amount))]
    return [(group / "cpu.max", f"{amount} {period}")]


def probe() -> tuple[bool, str]:
    """Whether quotas work here, and a sentence: how, or what is missing and what to do."""
    hierarchy = find(Path("/proc/self/mounts").read_text()) if Path("/proc/self/mounts").exists() else None
    if hierarchy is None:
        return False, "no mounted cgroup hierarchy has the cpu controller; use mechanism 'paced'"
    try:
        with Groups([0.5]):
            pass
    except ConfigError as error:
        return False, str(error)
    return True, f"CPU quotas by cgroup version {hierarchy.version} in {hierarchy.root}"


class Groups:
    """One group per worker, for as long as the context lasts.

    Args:
        cores: each worker's quota; None leaves it alone.
    """

    def __init__(self, cores: Sequence[float | None]) -> None:
        hierarchy = find(Path("/proc/self/mounts").read_text())
        if hierarchy is None:
            raise ConfigError(
                "mechanism 'cgroup' needs a mounted cgroup hierarchy with the cpu controller: use mechanism 'paced'"
            )
        self._hierarchy, self._cores = hierarchy, cores
        self.base = hierarchy.root / f"{tag()}-lab"

    def __enter__(self) -> Groups:
        try:
            self.base.mkdir(exist_ok=True)
            if self._hierarchy.version == 2:
                for folder in (self._hierarchy.root, self.base):
                    (folder / "cgroup.subtree_control").write_text("+cpu")
            for worker, cores in enumerate(self._cores):
                group(self.base, worker).mkdir(exist_ok=True)
                if cores is not None:
                    self.set(worker, cores)
        except OSError as error:
            self._undo()
            raise ConfigError(
                f"mechanism 'cgroup' needs the right to make groups in {self._hierarchy.root} ({error.strerror}): run as "
                f"root, or use mechanism 'paced'"
            ) from error
        except BaseException:
            self._undo()
            raise
        return self

    def _undo(self) -> None:
        try:
            remove(self.base)
        except OSError:  # what may not be made may not be removed either
            pass

    def set(self, worker: int, cores: float) -> None:
        """Change a worker's quota."""
        for path, text in writes(self._hierarchy, group(self.base, worker), cores):
            path.write_text(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove(self.base)


def group(base: Path, worker: int) -> Path:
    """A worker's group."""
    return base / f"worker-{worker:04d}"


def join(worker: int) -> None:
    """Move this process into the group of the worker it plays, if the lab made one."""
    base = os.environ.get(BASE)
    if base:
        (group(Path(base), worker) / "cgroup.procs").write_text(str(os.getpid()))


def remove(base: Path, patience_s: float = 5.0) -> None:
    """Remove a lab's groups; processes in them are killed first.

    Raises:
        OSError: this process may not, or a process in them does not end.
    """
    deadline = time.monotonic() + patience_s
    try:
        folders = [*(child for child in base.iterdir() if child.is_dir()), base]
    except FileNotFoundError:
        return
    for folder in folders:
        while folder.exists():
            try:
                for pid in (folder / "cgroup.procs").read_text().split():
                    if int(pid) > 0:  # 0: a process this one cannot see, in another namespace
                        os.kill(int(pid), signal.SIGKILL)
                folder.rmdir()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile, or another lab removes the same
            except OSError as error:
                if isinstance(error, PermissionError) or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def clean() -> list[str]:
    """Remove the groups that a lab left whose launcher is gone; those of another user are left to that user."""
    hierarchy = find(Path("/proc/self/mounts").read_text()) if Path("/proc/self/mounts").exists() else None
    if hierarchy is None:
        return []
    gone = []
    for folder in hierarchy.root.iterdir():
        if owner_alive(folder.name) is False:
            try:
                remove(folder)
            except OSError as error:
                warnings.warn(f"cannot remove {folder}, left by a lab that was killed: {error.strerror}", stacklevel=2)
            else:
                gone.append(str(folder))
    return gone
