"""`constant`: the batch stays what the loader was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.policies.batch.protocol import Gradients, Needs, Size


@dataclass(frozen=True, slots=True)
class Constant:
    """Nothing is measured, nothing changes."""

    name = "constant"
    needs: ClassVar[Needs] = "nothing"
    at: ClassVar[Literal["first", "last"]] = "first"

    def init(self) -> tuple[()]:
        """There is no state."""
        return ()

    def planned(self, step: int, samples: int) -> int | None:
        """What the plan has."""
        return None

    def update(self, seen: Gradients, state: tuple[()]) -> tuple[Size, tuple[()]]:
        """No change."""
        return Size(seen.total), state
