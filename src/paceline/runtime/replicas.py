"""What local training looks like from outside, whatever the method: `Rounds` agree, `GossipRounds` mix with neighbours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from paceline.runtime.sizing import Sketches


class Replicas(Protocol):
    """One worker's part in training with replicas that may differ."""

    @property
    def local(self) -> bool:
        """Whether replicas may differ now."""
        ...

    def after_step(
        self,
        epoch: int,
        *,
        ends_epoch: bool,
        loss: Callable[[], float | None],
        next_ends_epoch: Callable[[], bool] = ...,
    ) -> None:
        """An optimizer step was made (or skipped, on all counts as one).

        Args:
            epoch: the epoch it belongs to.
            ends_epoch: whether it was the epoch's last.
            loss: mean loss of the epoch, asked for at its end only; collective.
            next_ends_epoch: whether the next step is likely the epoch's last.
        """

    def probe(self, last: bool, resize: Callable[[int, Sketches], None]) -> None:
        """Look at the gradients of one step of each round, and tell `resize` the next step and all replicas' sketches at its end."""

    def settle(self) -> None:
        """Make all replicas agree, now; collective."""

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, the model is what replicas agree on; the same on every worker."""
        ...

    def finite(self) -> bool:
        """Whether the parameters that count are."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resume needs and all workers share."""
        ...

    def own_state(self) -> dict[str, Any]:
        """What differs between workers."""
        ...

    def load(self, state: dict[str, Any], own: dict[str, Any] | None) -> str | None:
        """Go on from a saved state; a sentence if replicas could not be taken over one by one."""
        ...

    def close(self, *, graceful: bool) -> None:
        """End what is under way; if graceful, after it has arrived."""
