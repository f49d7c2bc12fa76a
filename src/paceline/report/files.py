"""Files that are there as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from paceline.errors import ConfigError


@contextmanager
def whole(path: Path) -> Iterator[TextIO]:
    """A text file to write to, which takes its name when everything is written; a pipe or a device is written to as it is.

    Raises:
        ConfigError: it cannot be written.
    """
    path = path.resolve()  # a link stays one
    special = path.exists() and not path.is_file()
    part = path if special else path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8", errors="replace") as file:
            yield file
        if not special:
            part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): choose another place with -o") from error
    finally:
        if not special:
            part.unlink(missing_ok=True)
