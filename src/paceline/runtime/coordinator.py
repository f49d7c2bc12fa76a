"""Measure, gather, decide, plan: the loop that keeps the split in step with the workers' speed.

Once in `every` steps each worker sends the times of its last steps in one small non-blocking gather, and reads everybody's
at the next step. All workers see the same numbers and run the same pure policy, so they reach the same plan without a
leader. A digest of the newest plan travels with each gather: workers that disagree are caught and named.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.comm import Comm, PendingGather
from paceline.errors import ConfigError, DisagreementError, NonFiniteError
from paceline.events import EventLog
from paceline.policies.balance import AnyBalance
from paceline.policies.balance.window import COLUMNS, observe
from paceline.policies.balance.wrappers import HeldState
from paceline.policies.batch import Size
from paceline.policies.batch.cost import Cost
from paceline.runtime.lookout import Lookout, exchange_s
from paceline.runtime.meter import Meter, StepTimes
from paceline.runtime.plans import Plan, PlanBook
from paceline.runtime.sizing import Kept, Sizing, Sketches
from paceline.types import NO_CAP, Limits, Observation, from_plain, to_plain

Rows = NDArray[np.float64]
SHARD_GAIN = 0.02  # of a step's time, for which samples may change hands
WARM_UP_STEPS = 1  # the first step pays for lazy initialisation and tells nothing about speed
_HEAD = (
    6  # digest, learned cap, step of a non-finite gradient, step, epoch, whether shares can be cut into micro-batches
)


class Coordinator:
    """One worker's part in the common decision.

    Args:
        comm: the door to the other workers.
        policy: decides the split.
        limits: bounds given by the user.
        sizing: decides the global batch.
        every: steps in a window.
        horizon: how many steps ahead batches are cut, the most of any worker.
        log: where decisions go.
        meter: where step times come from.
        align: plans start at multiples of this many steps in an epoch (gradient accumulation).

    Attributes:
        lag: steps between sending times and reading everybody's; more where workers should not wait for each other.
        micro: this worker cuts its share into micro-batches where it is too large for its memory.
        owned: workers own shards: gives what each takes of them in a step. What the policy would rather have is kept as a `proposal`,
            and plans stay as they are.
        proposal: see there.
    """

    def __init__(
        self,
        comm: Comm,
        policy: AnyBalance,
        limits: Limits,
        sizing: Sizing,
        *,
        every: int,
        horizon: int,
        log: EventLog,
        meter: Meter,
        align: int = 1,
    ) -> None:
        limits.check(min(sizing.total, sizing.length))
        self._comm, self._policy, self._given, self._limits, self.sizing = comm, policy, limits, limits, sizing
        self._every, self._horizon, self._log, self._meter, self._align = every, horizon, log, meter, align
        self._state = policy.init(comm.size)
        self._cost = Cost.unknown(comm.size)
        self._lookout = Lookout(comm, log)
        self.book = PlanBook(Plan(0, policy, self._state, limits, sizing.total))
        self._times: list[StepTimes] = []
        self._sizes: set[int] = set()  # batches this worker has had
        self._fresh: set[int] = set()  # steps that were the first of their size
        self._under_way: PendingGather | Kept | None = None
        self._asked: tuple[int, int, bool] = (0, 0, False)  # step, epoch, ends_epoch of the gather under way
        self._last_ask = 0
        self._poisoned_step = -1
        self._epoch_start = 0
        self.learned_cap = NO_CAP
        self.micro, self._all_micro = False, False
        self.owned: Callable[[], tuple[int, ...]] | None = None
        self.proposal: tuple[int, ...] | None = None
        self.lag = 0
        self._log_plan(0, self.book.latest, "first plan: nothing measured yet", None, changed=True)

    def begin_epoch(self, step: int) -> None:
        """An epoch begins at `step`, and none of its batches is cut yet: the newest plan holds from there on."""
        self._epoch_start = step
        self.book.begin(step)

    def aligned(self, step: int) -> bool:
        """Whether an optimizer step lies between the batch before `step` and that of `step`."""
        return (step - self._epoch_start) % self._align == 0

    def turn(self, step: int, epoch: int, *, ends_epoch: bool = False) -> None:
        """Between two steps: take in what has arrived, decide, and ask again if a window is full.

        Args:
            step: the number of the next step.
            epoch: the epoch under way.
            ends_epoch: whether the step before was the last of its epoch.
        """
        for times in self._meter.take():
            if not times.finite:
                self._poisoned_step = times.step if self._poisoned_step < 0 else self._poisoned_step
            if times.samples not in self._sizes:  # kernels are chosen for a new shape: once, and slowly
                self._sizes.add(times.samples)
                self._fresh.add(times.step)
            if times.step >= WARM_UP_STEPS:
                self._times.append(times)
        waited = step - self._last_ask
        asks = waited >= self._every or (waited and ends_epoch and self._policy.per_epoch)
        if self._under_way is not None and (asks or waited >= self.lag):
            begun = time.perf_counter()
            rows = self._under_way.wait().numpy()
            self._meter.held(time.perf_counter() - begun)
            self._under_way = None
            self._decide(rows, step)
        if asks:
            self._ask(step, epoch, ends_epoch)

    @property
    def _total(self) -> int:
        return min(self.book.latest.total, self.sizing.length)

    @property
    def _width(self) -> int:
        return _HEAD + self._every * len(COLUMNS)

    @property
    def room(self) -> int:
        """The largest batch that fits the workers' memory: no bound, if all can cut their shares into micro-batches."""
        return NO_CAP if self._all_micro else self._given.room

    def resize(self, step: int, sketches: Sketches) -> None:
        """A round of local training has ended before `step`: decide the batch from its gradients' sketches."""
        self._adopt(self.sizing.from_sketches(sketches, self.room, self._fixed(sketches.exchange_s)), step)

    def follow(self, step: int, total: int) -> None:
        """A schedule has this batch at `step`: what is decided from now on is for it."""
        if total != self.sizing.total:
            self._adopt(Size(total, "as the schedule says"), step)

    def _adopt(self, size: Size | None, step: int) -> bool:
        """Plan with another global batch from now on, if one is asked for; never beyond data and memory."""
        total = 0 if size is None else max(1, min(size.total, self.sizing.length, self.room))
        if size is None or total == self.book.latest.total:
            return False
        before, self.sizing.total = self.book.latest.total, total
        self._limits = self._fitting(self._limits, self.sizing.largest)
        start = self._start(step)
        self.book.add(Plan(start, self._policy, self._state, self._limits, total))
        self.book.forget(step)
        self._log.write(
            "batch", step=step, start=start, total=total, before=before, reason=size.reason, noise=size.noise
        )
        return True

    def _start(self, step: int) -> int:
        """The first step no batch of which is cut yet."""
        ahead = step + self._horizon - self._epoch_start
        return self._epoch_start + -(-ahead // self._align) * self._align

    def _ask(self, step: int, epoch: int, ends_epoch: bool) -> None:
        row = torch.full((self._width + self.sizing.numbers(self._every),), float("nan"), dtype=torch.float64)
        row[0] = self.book.digest(self._total)
        row[1] = self.learned_cap
        row[2] = self._poisoned_step
        row[3], row[4], row[5] = step, epoch, float(self.micro)
        row[self._width :] = torch.tensor(self.sizing.pack(self._times, self._every), dtype=torch.float64)
        full = [times for times in self._times if times.full]
        recent = ([times for times in full if times.step not in self._fresh] or full)[-self._every :]
        for slot, times in enumerate(recent):
            begin = _HEAD + slot * len(COLUMNS)
            row[begin : begin + len(COLUMNS)] = torch.tensor(
                [getattr(times, name) for name in COLUMNS], dtype=torch.float64
            )
        columns = {name: [getattr(times, name) for times in self._times] for name in ("step", "at", *COLUMNS)}
        self._log.write("steps", **columns)
        self._times, self._fresh = [], set()
        self._under_way = self._comm.gather(row)
        self._asked, self._last_ask = (step - 1, epoch, ends_epoch), step

    def _decide(self, rows: Rows, step: int) -> None:
        self._check_place(rows[:, 3:5])
        self._check_digests(rows[:, 0])
        self._check_finite(rows[:, 2])
        self._all_micro = bool(rows[:, 5].all())
        self._limits = self._with_learned(rows[:, 1])
        times = rows[:, _HEAD : self._width].reshape(len(rows), self._every, len(COLUMNS))
        seen_step, epoch, ends_epoch = self._asked
        seen = observe(
            times, step=seen_step, epoch=epoch, ends_epoch=ends_epoch, total=self._total, limits=self._limits
        )
        resized = self._sized(rows[:, self._width :], times, seen, step)
        seen = dataclasses.replace(seen, total=self._total, limits=self._limits)
        self._lookout.take(times, seen)
        if not any(seen.samples) and not ends_epoch:
            if resized:
                self._log_plan(step, self.book.latest, "another batch, speeds as known", None, changed=True)
            return
        decision, self._state = self._policy.update(seen, self._state)
        if self.owned is not None:
            self._propose(self.owned())
            return
        current = self.book.latest
        changed = decision.split != current.cut(self._total) or current.limits != self._limits
        if changed:
            self.book.add(Plan(self._start(step), self._policy, self._state, self._limits, self._total))
            self.book.forget(step)
        self._log_plan(step, self.book.latest, decision.reason, decision.predicted_s, changed=changed or resized)

    def _sized(self, gradients: Rows, times: Rows, seen: Observation, step: int) -> bool:
        """Learn what steps cost, and decide the batch from a window's gradients; whether it is another one now."""
        if not self.sizing.measures:
            return False
        if any(seen.samples):
            self._cost = self._cost.add(seen, exchange_s(times))
        return self._adopt(self.sizing.from_window(gradients, self.room, self._fixed()), step)

    def _fixed(self, further_s: float = 0.0) -> float | None:
        """What a step costs before its first sample, in samples, with batches divided as they are."""
        plan = self.book.latest
        limits = plan.limits
        if limits.room < 2 * self._total:
            limits = dataclasses.replace(limits, cap=(NO_CAP,) * self._comm.size)

        def divide(total: int) -> tuple[int, ...]:
            return plan.policy.split(total, limits, plan.state)

        return self._cost.fixed(self._total, divide, further_s)

    def _propose(self, current: tuple[int, ...]) -> None:
        """Workers own shards: say what split would be faster than theirs, by more than it is known to err."""
        policy, state = self._policy, self._state
        while isinstance(state, HeldState):  # what is held back is for splits that change in every step
            policy, state = policy.inner, state.live  # type: ignore[attr-defined]
        best = policy.split(self._total, self._limits, state)
        now, then = policy.predict_s(current, state), policy.predict_s(best, state)
        self.proposal = None
        if now is None or then is None:
            return
        gain, need = 1.0 - then[0] / now[0], SHARD_GAIN + 2.0 * now[1] / now[0]
        if gain > need:
            self.proposal = best

    def _check_place(self, places: Rows) -> None:
        found = [(int(step), int(epoch)) for step, epoch in places.tolist()]
        common = Counter(found).most_common(1)[0][0]
        for rank, (step, epoch) in enumerate(found):
            if (step, epoch) != common:
                raise DisagreementError(
                    f"all workers must iterate over the loader alike: worker {rank} is at step {step} of epoch {epoch}, the "
                    f"others are at step {common[0]} of epoch {common[1]}. Do not break, peek or loop on one worker alone"
                )

    def _check_digests(self, digests: Rows) -> None:
        if len(set(digests.tolist())) > 1:
            common = Counter(digests.tolist()).most_common(1)[0][0]
            odd = [rank for rank, value in enumerate(digests.tolist()) if value != common]
            raise DisagreementError(
                f"all workers must hold the same plan, but workers {odd} hold another one at step {self._asked[0]}: "
                f"their arithmetic or their version differs. Run the same version of paceline and numpy everywhere"
            )

    def _check_finite(self, steps: Rows) -> None:
        bad = [(rank, int(at)) for rank, at in enumerate(steps.tolist()) if at >= 0]
        if bad:
            first = min(at for _, at in bad)  # a step later everybody computes with what the sum has carried over
            named = " and ".join(f"worker {rank}" for rank, at in bad if at == first)
            raise NonFiniteError(
                f"gradients must be finite, but that of {named} was NaN or infinite at step {first}, and the optimizer "
                f"used the sum. Go back to the last checkpoint; look at the learning rate and at that worker's samples"
            )

    def _with_learned(self, caps: Rows) -> Limits:
        """The user's limits, tightened by what out-of-memory errors have taught, as far as the batch still fits."""
        limits = self._tightened([int(cap) for cap in caps.tolist()], min(self.sizing.largest, self.sizing.length))
        if limits is self._given and (caps < self._given.cap_array).any():
            self._log.write(
                "note",
                text=f"learned memory caps leave no room for {self._total} samples: workers go over them in micro-batches",
            )
        return limits

    def _tightened(self, caps: list[int], total: int) -> Limits:
        """The user's limits with lower caps, or as they are if the batch would not fit any more."""
        cap = tuple(min(pair) for pair in zip(self._given.cap, caps, strict=True))
        lower = tuple(min(pair) for pair in zip(self._given.lower, cap, strict=True))
        return self._fitting(dataclasses.replace(self._given, cap=cap, lower=lower), total)

    def _fitting(self, limits: Limits, total: int) -> Limits:
        """These limits if the batch fits them, else the user's, else those without caps: shares are cut into micro-batches."""
        if limits.room >= total:
            return limits
        return (
            self._given
            if self._given.room >= total
            else dataclasses.replace(self._given, cap=(NO_CAP,) * self._comm.size)
        )

    def _log_plan(self, step: int, plan: Plan, reason: str, predicted_s: float | None, *, changed: bool) -> None:
        if not (changed or self._log.tells):
            return
        self._log.write(
            "plan",
            step=step,
            start=plan.start,
            split=plan.cut(self._total),
            changed=changed,
            reason=reason,
            predicted_s=predicted_s,
            digest=self.book.digest(self._total),
        )

    def state(self) -> dict[str, Any]:
        """What a resume needs, apart from what differs between workers."""
        kept = None
        if self._under_way is not None:
            rows = self._under_way.wait()
            self._under_way = Kept(rows)
            kept = rows.tolist()
        return {
            "policy": self._policy.name,
            "size": self._comm.size,
            "state": to_plain(self._state),
            "plans": [
                {
                    "start": plan.start,
                    "state": to_plain(plan.state),
                    "cap": plan.limits.cap,
                    "total": plan.total,
                }
                for plan in self.book.plans
            ],
            "sizing": self.sizing.plain(),
            "cost": to_plain(self._cost),
            "past": to_plain(self._lookout.past),
            "proposal": self.proposal,
            "micro": self._all_micro,
            "under_way": kept,
            "asked": list(self._asked),
            "last_ask": self._last_ask,
            "epoch_start": self._epoch_start,
        }

    def own_state(self) -> dict[str, Any]:
        """What differs between workers."""
        times = [*self._times, *(times for times in self._meter.pending() if times.step >= WARM_UP_STEPS)]
        return {"times": [to_plain(one) for one in times], "learned_cap": self.learned_cap}

    def load(self, state: dict[str, Any], own: dict[str, Any] | None, step: int) -> str | None:
        """Go on from a saved state.

        Returns:
            A sentence if what was learned could not be taken over (another policy, another number of workers).
        """
        self._meter.clear()
        self._times, self._under_way, self._poisoned_step, self._last_ask = [], None, -1, step
        self._state = template = self._policy.init(self._comm.size)
        self._epoch_start = state["epoch_start"]
        self.sizing.load(state["sizing"])
        self._all_micro = bool(state["micro"]) and state["size"] == self._comm.size
        try:
            if state["policy"] != self._policy.name or state["size"] != self._comm.size or own is None:
                raise ConfigError("another run")
            learned = from_plain(template, state["state"])
            plans = [
                Plan(
                    plan["start"],
                    self._policy,
                    from_plain(template, plan["state"]),
                    self._tightened(plan["cap"], min(plan["total"], self.sizing.length)),
                    plan["total"],
                )
                for plan in state["plans"]
            ]
        except ConfigError:
            self.sizing.total = min(self.sizing.total, max(self.room, 1))
            self._limits = self._fitting(self._given, min(self.sizing.total, self.sizing.length))
            self.book = PlanBook(Plan(0, self._policy, self._state, self._limits, self.sizing.total))
            return (
                f"saved by {state['size']} workers under {state['policy']!r}, resumed by {self._comm.size} under "
                f"{self._policy.name!r}: speeds are measured anew"
            )
        self._state = learned
        self._cost = from_plain(self._cost, state["cost"]) if "cost" in state else self._cost
        if "past" in state:
            self._lookout.past = from_plain(self._lookout.past, state["past"])
        self.proposal = None if state["proposal"] is None else tuple(state["proposal"])
        self.book = PlanBook(plans[0])
        for plan in plans[1:]:
            self.book.add(plan)
        self._limits = self.book.latest.limits
        kept = state["under_way"]
        if kept is not None and len(kept[0]) == self._width + self.sizing.numbers(self._every):
            self._under_way = Kept(torch.tensor(kept, dtype=torch.float64))
        asked_step, asked_epoch, ended = state["asked"]
        self._asked, self._last_ask = (asked_step, asked_epoch, bool(ended)), state["last_ask"]
        self._times = [StepTimes(**{**times, "parts": tuple(map(tuple, times["parts"]))}) for times in own["times"]]
        self.learned_cap = own["learned_cap"]
        return None
