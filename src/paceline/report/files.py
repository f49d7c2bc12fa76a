"""Files that are there as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from paceline.errors import ConfigError


@contextmanager
def whole(path: Path) -> Iterator[TextIO]:
    """A text file to write to, which takes its name when everything is written.

    Raises:
        ConfigError: it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8", errors="replace") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): choose another place with -o") from error
    finally:
        part.unlink(missing_ok=True)
