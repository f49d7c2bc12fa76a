"""Settings of a run and where they come from.

An explicit argument of `paceline.init` beats the command line, which beats a file, which beats the environment:

    paceline.init(balance="dbs")  >  paceline run --balance dbs  >  paceline.toml: balance = "dbs"  >  PACELINE_BALANCE

The command line reaches workers as one JSON object in `PACELINE_CLI`; the file is `paceline.toml` in the working
folder, or the one named by `PACELINE_CONFIG`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, unknown_name
from paceline.policies.balance import AnyBalance, policy
from paceline.policies.batch import AnyBatch, batch_policy
from paceline.policies.batch.rates import check_rule
from paceline.policies.recipes import recipe
from paceline.policies.sync import Sync, sync_policy

CHECKS: dict[str, Callable[[str], object]] = {
    "balance": policy,
    "sync": sync_policy,
    "batch": batch_policy,
    "lr_rule": check_rule,
    "recipe": recipe,
}


def check_names(options: Mapping[str, Any]) -> None:
    """Refuse names of policies that do not exist, before anything starts; objects and None pass."""
    for name, check in CHECKS.items():
        if isinstance(options.get(name), str):
            check(options[name])


TRACKERS = ("wandb", "mlflow")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run can be told.

    Args:
        balance: name of a balance policy, or the policy itself.
        sync: name of a sync policy, with settings after a colon ("overlap:h=8,compress=int8"), or the policy itself.
        batch: name of a batch policy, with settings after a colon ("goodput:most=4096"), or the policy itself.
        lr_rule: what becomes of the learning rate when the batch changes: "none", "linear", "sqrt" or "adascale".
        recipe: name of a published method, which stands in for settings that nobody gave.
        nodes: which workers are on which node: "2,2", or lists of workers; None goes by the names of hosts.
        seed: decides the order of samples, together with the epoch.
        run_dir: folder for the event log; None keeps none.
        log_mb: most megabytes that a worker's events may take; older ones make room.
        tensorboard: folder for TensorBoard scalars, written by worker 0 as the run goes on.
        track: "wandb", "mlflow", or both with a comma between: told the same scalars.
        replan_every: steps in a window: times are gathered, and a plan decided, this often.
        max_local_batch: most samples this worker can hold: one number, or one per worker (None: no cap).
        min_local_batch: fewest samples a worker takes while the batch reaches for all of them.
        granularity: plan in multiples of this many samples.
        timeout_s: longest wait for another worker.
        device: "cuda", "cuda:1", "cpu"; None takes this worker's GPU if there is one.
        backend: "nccl", "gloo"; None takes nccl where every worker has a GPU of its own.
    """

    balance: str | AnyBalance = "affine"
    sync: str | Sync = "allreduce"
    batch: str | AnyBatch = "constant"
    lr_rule: str = "none"
    recipe: str | None = None
    nodes: str | tuple[tuple[int, ...], ...] | None = None
    seed: int = 0
    run_dir: str | None = None
    log_mb: int = 256
    tensorboard: str | None = None
    track: str | None = None
    replan_every: int = 4
    max_local_batch: int | tuple[int | None, ...] | None = None
    min_local_batch: int = 1
    granularity: int = 1
    timeout_s: float = 300.0
    device: str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("replan_every", 1),
            ("min_local_batch", 1),
            ("granularity", 1),
            ("seed", 0),
            ("log_mb", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be a whole number, at least {least}; got {value!r}")
        if not isinstance(self.timeout_s, (int, float)) or not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be a positive number of seconds; got {self.timeout_s!r}")
        caps = self.max_local_batch if isinstance(self.max_local_batch, tuple) else (self.max_local_batch,)
        for cap in caps:
            if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap < 1):
                raise ConfigError(f"max_local_batch must be whole numbers, at least 1; got {cap!r}")
        for name in filter(None, (part.strip() for part in (self.track or "").split(","))):
            if name not in TRACKERS:
                raise unknown_name("tracker", name, TRACKERS)
        check_names({name: getattr(self, name) for name in CHECKS})
        batch = self.batch_policy
        if self.sync_policy.name == "gossip" and batch.needs != "nothing":
            raise ConfigError(
                f"batch={batch.name!r} compares the gradients of all workers, with sync='gossip' neighbours alone meet: use "
                f"sync='local', or batch='schedule:...'"
            )
        if self.lr_rule == "adascale" and batch.needs == "nothing" and batch.name != "constant":
            raise ConfigError(
                f"lr_rule='adascale' needs the noise scale, which batch={batch.name!r} does not measure: use 'linear' or 'sqrt'"
            )

    @property
    def policy(self) -> AnyBalance:
        """The balance policy itself."""
        return policy(self.balance) if isinstance(self.balance, str) else self.balance

    @property
    def sync_policy(self) -> Sync:
        """The sync policy itself."""
        return sync_policy(self.sync) if isinstance(self.sync, str) else self.sync

    @property
    def batch_policy(self) -> AnyBatch:
        """The batch policy itself."""
        return batch_policy(self.batch) if isinstance(self.batch, str) else self.batch

    def policies(self) -> dict[str, str]:
        """The names of the policies, whether given by name or as objects."""
        return {"balance": self.policy.name, "sync": self.sync_policy.name, "batch": self.batch_policy.name}

    def plain(self) -> dict[str, Any]:
        """As JSON values, for the event log and the handshake."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("balance", "sync", "batch"):
            if not isinstance(values[name], str):
                values[name] = repr(values[name])
        if isinstance(self.nodes, tuple):
            values["nodes"] = [list(part) for part in self.nodes]
        if isinstance(self.max_local_batch, tuple):
            values["max_local_batch"] = list(self.max_local_batch)
        return values


_WORDS = {
    "balance",
    "sync",
    "batch",
    "lr_rule",
    "recipe",
    "nodes",
    "run_dir",
    "tensorboard",
    "track",
    "device",
    "backend",
}
NAMES = tuple(f.name for f in fields(Settings))
PLACES = {"run_dir", "tensorboard", "device", "backend", "max_local_batch"}  # may differ from worker to worker


def resolve(explicit: Mapping[str, Any], environ: Mapping[str, str], folder: Path) -> tuple[Settings, dict[str, str]]:
    """Settings from every source, and for each setting that is not a default the source it came from.

    >>> settings, sources = resolve({"seed": 3}, {"PACELINE_BALANCE": "dbs", "PACELINE_SEED": "7"}, Path("/"))
    >>> settings.seed, settings.balance, sources
    (3, 'dbs', {'balance': 'environment', 'seed': 'argument'})
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, found in (
        ("environment", _from_environ(environ)),
        ("file", _from_file(environ, folder)),
        ("command line", json.loads(environ.get("PACELINE_CLI", "{}"))),
        ("argument", dict(explicit)),
    ):
        for name, value in found.items():
            if name not in NAMES:
                raise unknown_name(f"setting (from the {source})", name, NAMES)
            if name == "max_local_batch" and isinstance(value, (list, tuple)):
                value = tuple(value)
            if name == "nodes" and isinstance(value, (list, tuple)):
                value = tuple(tuple(part) for part in value)
            values[name] = value
            sources[name] = source
    if values.get("recipe") is not None:
        for name, value in recipe(values["recipe"]).items():
            if name not in values:
                values[name], sources[name] = value, "recipe"
    return Settings(**values), sources


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in NAMES:
        text = environ.get(f"PACELINE_{name.upper()}")
        if text is None:
            continue
        found[name] = text if name in _WORDS else _number(name, text)
    return found


def _number(name: str, text: str) -> Any:
    try:
        return json.loads(f"[{text}]") if "," in text else json.loads(text)
    except json.JSONDecodeError:
        raise ConfigError(f"PACELINE_{name.upper()} must be a number; got {text!r}") from None


def _from_file(environ: Mapping[str, str], folder: Path) -> dict[str, Any]:
    named = environ.get("PACELINE_CONFIG")
    path = Path(named) if named else folder / "paceline.toml"
    if not path.is_file():
        if named:
            raise ConfigError(f"PACELINE_CONFIG must name a file; there is no {path}")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
