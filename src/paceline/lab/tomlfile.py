"""TOML files that people write by hand: every complaint names the file, the line, the rule and the value.

`tomllib` keeps no positions, so the lines of tables and keys are found by a scan of their headers.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from paceline.errors import ConfigError, unknown_name

Path = tuple[str | int, ...]
_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-\"']+)\s*=")


def line_numbers(text: str) -> dict[Path, int]:
    """The line of every table and key.

    >>> line_numbers('a = 1\\n[[w]]\\nb = 2\\n[[w]]\\n[w.c]\\nd = 3')
    {('a',): 1, ('w', 0): 2, ('w', 0, 'b'): 3, ('w', 1): 4, ('w', 1, 'c'): 5, ('w', 1, 'c', 'd'): 6}
    """
    found: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    here: Path = ()
    inside = ""  # the quotes of a string that goes over several lines
    for number, line in enumerate(text.splitlines(), 1):
        if inside:
            inside = "" if inside in line else inside
            continue
        for quotes in ('"""', "'''"):
            if line.count(quotes) % 2:
                inside = quotes
        if header := _HEADER.match(line):
            parts = [part.strip(" \"'") for part in header[2].split(".")]
            path: Path = ()
            for position, part in enumerate(parts):
                path = (*path, part)
                last = position == len(parts) - 1
                if last and header[1] == "[[":
                    counts[path] = counts.get(path, -1) + 1
                if path in counts:
                    path = (*path, counts[path])
            for nested in [key for key in counts if key[: len(path)] == path and len(key) > len(path)]:
                del counts[nested]
            here = path
            found.setdefault(here, number)
        elif key := _KEY.match(line):
            found.setdefault((*here, key[1].strip("\"'")), number)
    return found


def read_text(path: os.PathLike[str]) -> str:
    """A file's text.

    Raises:
        ConfigError: it cannot be read, or is not text.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be a readable text file in UTF-8: {error}") from None


class Section:
    """A table of a TOML file, read with rules.

    Args:
        data: the table.
        where: the file's name.
        lines: from `line_numbers`.
        path: where the table is.
    """

    def __init__(self, data: dict[str, Any], where: str, lines: dict[Path, int], path: Path = ()) -> None:
        self.data, self.where, self._lines, self._path = data, where, lines, path

    @classmethod
    def parse(cls, text: str, where: str) -> Section:
        """The whole file."""
        try:
            return cls(tomllib.loads(text), where, line_numbers(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{where} is not valid TOML: {error}") from None

    def at(self, name: str = "") -> str:
        """File and line of the table, or of a key in it."""
        for path in ((*self._path, name) if name else self._path, self._path):
            if path in self._lines:
                return f"{self.where}, line {self._lines[path]}"
        return self.where

    def error(self, text: str, name: str = "") -> ConfigError:
        """An error about the table, or about a key in it."""
        return ConfigError(f"{self.at(name)}: {text}")

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def only(self, known: Collection[str]) -> None:
        """Refuse keys that mean nothing here."""
        for key in self.data:
            if key not in known:
                raise unknown_name(f"key at {self.at(key)}", key, known)

    def number(self, name: str, default: float = 0.0, *, above_zero: bool = False, most: float = math.inf) -> float:
        """A number of at least 0, or above 0."""
        value = self.data.get(name, default)
        wrong = not _is_number(value)
        if wrong or value < 0 or (above_zero and value == 0) or value > most:
            bound = f" and at most {most:g}" if most < math.inf else ""
            raise self.error(
                f"{name} must be a number {'above' if above_zero else 'of at least'} 0{bound}, got {value!r}", name
            )
        return float(value)

    def whole(self, name: str, default: int = 0, *, least: int = 0) -> int:
        """A whole number."""
        value = self.data.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or (value < least and name in self.data):
            raise self.error(f"{name} must be a whole number of at least {least}, got {value!r}", name)
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.data.get(name, default)
        if not isinstance(value, str):
            raise self.error(f"{name} must be a string, got {value!r}", name)
        return value

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        """A string out of a few."""
        value = self.text(name, default)
        if value not in known:
            raise unknown_name(f"{name} at {self.at(name)}", value, known)
        return value

    def interval(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers of at least 0, the smaller first."""
        value = self.data.get(name, list(default))
        pair = isinstance(value, list) and len(value) == 2
        fine = pair and all(_is_number(one) and one >= 0 for one in value)
        if not fine or value[0] > value[1]:
            raise self.error(f"{name} must be two numbers [least, most] of at least 0, got {value!r}", name)
        return float(value[0]), float(value[1])

    def list_of(self, name: str, kind: type, default: Sequence[Any]) -> list[Any]:
        """A list of strings or whole numbers."""
        value = self.data.get(name, list(default))
        if not isinstance(value, list) or not value or not all(type(one) is kind for one in value):
            word = {str: "strings", int: "whole numbers"}[kind]
            raise self.error(f"{name} must be a list of {word}, not empty, got {value!r}", name)
        return value

    def table(self, name: str) -> Section:
        """A table in this one; empty if it is not there."""
        value = self.data.get(name, {})
        if not isinstance(value, dict):
            raise self.error(f"{name} must be a table, got {value!r}", name)
        return Section(value, self.where, self._lines, (*self._path, name))

    def tables(self, name: str) -> Iterator[Section]:
        """The [[name]] tables in this one."""
        value = self.data.get(name, [])
        if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
            raise self.error(f"{name} must be [[{name}]] tables", name)
        for number, entry in enumerate(value):
            yield Section(entry, self.where, self._lines, (*self._path, name, number))


def _is_number(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) < 1e18  # also neither infinite nor NaN
