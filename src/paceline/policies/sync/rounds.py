"""The cycle that all local methods share: H steps, send, W more steps, take in."""

from __future__ import annotations

import dataclasses

from paceline.errors import ConfigError
from paceline.policies.sync.protocol import Action, Moment, Scope, SyncState
from paceline.policies.sync.steps import Steps, guarded


def check_delay(delay: int | None, least: int, what: str = "delay (W)", of: str = "H") -> None:
    """W must not exceed H: what is under way is taken in before the next part is sent."""
    if delay is None:
        return
    if not isinstance(delay, int) or isinstance(delay, bool) or delay < 0:
        raise ConfigError(f"{what} must be a whole number, at least 0; got {delay!r}")
    if delay > least:
        raise ConfigError(
            f"{what} must not exceed {of}: an exchange is taken in before the next one is sent; got {delay} and {least}. "
            f"Raise {of} to {delay} or more"
        )


def begin(every: int, delay: int | None, phase: str = "rounds") -> SyncState:
    """The state at the beginning of the first round."""
    return SyncState(phase=phase, every=every, delay=every if delay is None else delay)


def cycle(
    seen: Moment,
    state: SyncState,
    *,
    scope: Scope,
    steps: Steps,
    delay: int | None,
    drift_limit: float = 0.0,
    settle: bool = True,
    fragments: int = 1,
) -> tuple[Action, SyncState]:
    """One step further in the round.

    Args:
        seen: now.
        state: before this step.
        scope: whose gradients are summed meanwhile.
        steps: the rule for H.
        delay: W; None is all of the next round.
        drift_limit: of the drift guard; 0 is none.
        settle: exchange at the end of every epoch and wait for it, so that all replicas agree there.
        fragments: parts; one goes every H / fragments steps.
    """
    since, age = state.since + 1, state.age + 1 if state.age >= 0 else -1
    settles = settle and seen.ends_epoch
    due = since >= max(1, state.every // fragments)
    merge = age >= 0 and (age >= state.delay or due or settles)
    if not (due or settles):
        return Action(scope, merge=merge), dataclasses.replace(state, since=since, age=-1 if merge else age)
    wanted, why = steps.next(seen, state.every * state.shrink)
    every, shrink, guard = guarded(wanted, seen, state, drift_limit)
    waits = settles or delay == 0
    part = state.fragment if fragments > 1 and not settles else -1
    changed = every != state.every
    after = dataclasses.replace(
        state,
        every=every,
        delay=max(1, every // fragments) if delay is None else min(delay, max(1, every // fragments)),
        since=0,
        age=-1 if waits else 0,
        fragment=(state.fragment + 1) % fragments if part >= 0 else state.fragment,
        shrink=shrink,
    )
    reason = "; ".join(text for text in (guard, why if changed else "") if text)
    return Action(scope, merge=merge, send=True, wait=waits, agree=settles, fragment=part, reason=reason), after
