"""Policies by name, with settings after a colon: `overlap:h=8,compress=int8`."""

from __future__ import annotations

from typing import Any

from paceline.errors import ConfigError


def settings_of(rest: str, what: str, example: str) -> dict[str, str]:
    """What follows the colon, as names and texts.

    >>> settings_of("h=8,compress=int8", "a sync policy", "local:h=8")
    {'h': '8', 'compress': 'int8'}

    Args:
        rest: the text after the colon.
        what: the kind of policy, for errors.
        example: how it is written.
    """
    found = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if not equals:
            raise ConfigError(f"settings of {what} are written name=value, as in '{example}'; got {part!r}")
        found[key.strip()] = text.strip()
    return found


def value(text: str) -> Any:
    """A text as what it looks like: true, false, none, a whole number, a number, or itself.

    >>> value("8"), value("0.5"), value("none"), value("ring")
    (8, 0.5, None, 'ring')
    """
    if text in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
