"""Every error paceline raises on purpose.

    PacelineError
    ├── ConfigError        a setting, a file or an argument breaks a rule (also a ValueError)
    ├── DisagreementError  ranks of one run were started with different settings or data
    ├── PeerError          another worker did not take part
    │   ├── PeerTimeout    it did not arrive in time
    │   └── PeerLost       its connection closed
    ├── NonFiniteError     a worker produced a NaN or infinite gradient
    ├── CheckpointError    a checkpoint is truncated, corrupt, foreign or too new
    └── LaunchError        workers could not be started, or one of them failed

Messages state the rule, the value that broke it, and the way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    """Base of all errors raised by paceline."""


class ConfigError(PacelineError, ValueError):
    """A setting, a file or an argument breaks a stated rule."""


class DisagreementError(PacelineError):
    """Ranks of one run disagree about something that must be equal on all of them."""


class PeerError(PacelineError):
    """Another worker did not take part in a collective operation."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class PeerTimeout(PeerError):
    """Another worker did not arrive within the timeout."""


class PeerLost(PeerError):
    """The connection to another worker closed."""


class NonFiniteError(PacelineError):
    """A worker's gradient was NaN or infinite and the optimizer used it."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be loaded, and loading it anyway would be wrong."""


class LaunchError(PacelineError):
    """Workers could not be started, or one of them failed."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not in a registry, with the nearest known name.

    >>> str(unknown_name("balance policy", "afine", ["affine", "dbs"]))
    "unknown balance policy 'afine': did you mean 'affine'? Known: affine, dbs"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f": did you mean {near[0]!r}?" if near else "."
    return ConfigError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}")


class Stopped(KeyboardInterrupt):
    """The user interrupted, and the workers that were running are gone."""
