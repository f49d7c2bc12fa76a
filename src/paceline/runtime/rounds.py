"""What a sync policy decides, done: after every optimizer step exchange, merge, and say whose gradients come next."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paceline.comm import Comm
from paceline.errors import CheckpointError, ConfigError
from paceline.events import EventLog
from paceline.policies.sync import Action, Moment, Round, Sync, SyncState
from paceline.runtime.exchange import Exchange, Outcome
from paceline.runtime.flat import Flat
from paceline.runtime.hook import WeightedSum
from paceline.runtime.sizing import Probe, Sketches
from paceline.runtime.sketch import Sketch
from paceline.runtime.topology import Topology
from paceline.types import from_plain, to_plain


def check(policy: Sync, model: Any, optimizer: Any, compress: str | None, ddp: dict[str, Any]) -> None:
    """Refuse what contradicts local training, before anything is made.

    Raises:
        ConfigError: no optimizer, or something that exchanges in every step.
    """
    if optimizer is None:
        raise ConfigError(
            f"sync={policy.name!r} hangs on the optimizer's steps: call pace.wrap(model, optimizer) with the optimizer"
        )
    if compress:
        raise ConfigError(
            f"compress={compress!r} is for gradients that are summed in every step, sync={policy.name!r} exchanges changes "
            f"of parameters: leave it out, and use sync='{policy.name}:compress={compress}'"
        )
    if ddp.get("find_unused_parameters"):
        raise ConfigError(
            f"find_unused_parameters=True makes DistributedDataParallel ask all workers in every step, sync={policy.name!r} "
            f"does not wait for them: use pace.step(fn, batch), which finds unused parameters by itself"
        )
    if any(isinstance(part, torch.nn.SyncBatchNorm) for part in model.modules()):
        raise ConfigError(
            f"SyncBatchNorm waits for all workers in every step, sync={policy.name!r} does not: use BatchNorm (its running "
            f"statistics are averaged), or sync='allreduce'"
        )


class Rounds:
    """One worker's part in local training.

    Args:
        policy: decides.
        comm: the door to the other workers.
        topology: who is on which node.
        module: the plain model.
        optimizer: its optimizer.
        total: the hook that sums gradients; its scope is set here.
        log: where exchanges are noted.
    """

    def __init__(
        self,
        policy: Sync,
        comm: Comm,
        topology: Topology,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        total: WeightedSum,
        log: EventLog,
    ) -> None:
        self._policy, self._comm, self._topology = policy, comm, topology
        self._optimizer, self._total, self._log = optimizer, total, log
        self._flat = Flat(module)
        self.exchange = Exchange(comm, topology, policy.terms, self._flat)
        total.mates = topology.members[topology.node_of(comm.rank)]
        total.team = comm.teams(topology.members, "the gradient sum within a node", gradients=True)
        scope, self._state = policy.init()
        total.scope = scope if self._several else "all"
        self._step = 0
        self._round: Round | None = None
        self._step_s: list[float] = []
        self._since: float | None = None
        self._sent_delay, self._waited_s = 0, 0.0
        self._blocked = False  # the exchange under way is waited for where it was sent
        self._depth = 0  # of consensus
        self._probe: Probe | None = None
        self._resize: Callable[[int, Sketches], None] = lambda *_: None
        self.refresh()
        self._hook = module.register_load_state_dict_post_hook(lambda *_: self.refresh())

    def refresh(self) -> None:
        """The model was loaded, on all workers: that is the anchor now."""
        if self.exchange.under_way:
            self.exchange.take()
        self._flat.read(self.exchange.anchor, 0, self._everything)
        self._fence()

    def probe(self, last: bool, resize: Callable[[int, Sketches], None]) -> None:
        """Look at the gradients of one step of each round, and tell `resize` the next step and all replicas' sketches at its end."""
        self._total.sketch = Sketch()
        self._probe = Probe(self._comm, self._total.sketch, self.exchange.replicas, last=last)
        self._resize = resize

    @property
    def _several(self) -> bool:
        return len(self.exchange.replicas) > 1

    @property
    def _everything(self) -> int:
        return self._flat.length + self._flat.tail

    @property
    def local(self) -> bool:
        """Whether replicas may differ now."""
        return self._total.scope != "all"

    def _fence(self) -> None:
        if self._flat.on_cuda:
            torch.cuda.current_stream().synchronize()

    def forget_time(self) -> None:
        """The loop paused (an evaluation, a save): the time until the next step tells nothing."""
        self._since = None

    def after_step(
        self,
        epoch: int,
        *,
        ends_epoch: bool,
        loss: Callable[[], float | None],
        next_ends_epoch: Callable[[], bool] = lambda: False,
    ) -> None:
        """An optimizer step was made (or skipped, on all counts as one)."""
        self._step += 1
        self._waited_s = 0.0
        if self._several:
            seen = Moment(
                step=self._step,
                epoch=epoch,
                ends_epoch=ends_epoch,
                lr=float(self._optimizer.param_groups[0]["lr"]),
                round=self._round,
                loss=loss() if ends_epoch else None,
            )
            window = max(1, self._state.every // self._policy.terms.fragments)  # what the exchange of now ends
            action, self._state = self._policy.update(seen, self._state)
            self._do(action)
            if self._probe is not None and self.local:
                following = max(1, self._state.every // self._policy.terms.fragments)
                last = self._state.since + 1 >= following or next_ends_epoch()
                found = self._probe.after_step(
                    self._total.step, ends=action.send, begins=action.merge or action.wait, next_ends=last
                )
                if found is not None:
                    blocks = self._blocked and not self._state.delay  # others wait at the end of an epoch alone
                    waited = self._round.transfer_s if blocks and self._round is not None else 0.0
                    self._resize(
                        self._total.step + 1,
                        dataclasses.replace(found, exchange_s=waited / window),
                    )
        elif ends_epoch:
            loss()
        now = time.perf_counter()
        if self._since is not None:
            self._step_s.append(now - self._since - self._waited_s)
        self._since = now

    def _do(self, action: Action) -> None:
        early = self._policy.terms.merge == "daso" and action.merge and action.send and not action.wait
        outcome = self._arrived() if action.merge and self.exchange.under_way else None
        ready = self.exchange.hold(*self._span(action.fragment)) if early else None
        if outcome is not None:
            self._take_in(outcome)
        if action.send:
            if not (early or action.wait):
                ready = self.exchange.hold(*self._span(action.fragment))
            self._send(action, ready)
            if action.wait:
                self._take_in(self._arrived())
        if action.scope != self._total.scope:
            self._change_scope(action.scope)
        if action.reason:
            self._log.write("sync", step=self._step, policy=self._policy.name, reason=action.reason, state=self._state)

    def _span(self, fragment: int) -> tuple[int, int]:
        if fragment < 0:
            return 0, self._flat.length
        parts = self._policy.terms.fragments
        return self._flat.length * fragment // parts, self._flat.length * (fragment + 1) // parts

    def _send(self, action: Action, ready: Any = None, *, plain: bool = False) -> None:
        start, end = self._span(action.fragment)
        if action.wait:
            self._fence()
        # On CUDA the host runs ahead and catches up where it merges: only the mean tells.
        typical = statistics.fmean if self._flat.on_cuda else statistics.median
        step_s = typical(self._step_s) if self._step_s else 0.0
        self.exchange.start(
            start,
            end,
            samples=self._total.processed,
            step_s=step_s,
            lr=float(self._optimizer.param_groups[0]["lr"]),
            agree=action.agree,
            plain=plain,
            held=not action.wait,
            ready=ready,
        )
        self._total.processed, self._step_s, self._blocked = 0, [], action.wait
        self._sent_delay = self._state.delay

    def _arrived(self) -> Outcome:
        begun = time.perf_counter()
        outcome = self.exchange.arrive()
        self._waited_s += time.perf_counter() - begun
        return outcome

    def _take_in(self, outcome: Outcome) -> None:
        """Merge. Where an exchange was waited for nothing happened meanwhile, and the replica becomes A' itself."""
        exchange, terms, flat = self.exchange, self._policy.terms, self._flat
        exchange.take()
        start, end = outcome.start, outcome.end
        if outcome.restart:
            flat.write(exchange.anchor, 0, flat.length)
            self._zero_state()
        elif self._blocked:
            if outcome.exact:  # else what is left was added on the way
                flat.write(exchange.anchor, start, end)
        elif terms.merge == "daso":
            replicas, weight = len(exchange.replicas), 2 * max(1, self._sent_delay)
            flat.mix(exchange.anchor, start, end, replicas / (weight + replicas))
        else:
            flat.add(exchange.sent, start, end, origin=start)
        flat.write(exchange.anchor, flat.length, self._everything)
        self._fence()
        if terms.optimizer_state == "reset":
            self._zero_state()
        elif terms.optimizer_state == "average":
            self._average_state()
        self._round = outcome.round
        self._log.write(
            "round",
            step=self._step,
            span=[start, end],
            every=self._state.every,
            delay=0 if self._blocked else self._sent_delay,
            transfer_s=outcome.transfer_s,
            waited_s=self._waited_s,
            num_bytes=outcome.num_bytes,
            step_s=outcome.round.step_s,
            drift=outcome.round.drift,
            weights=outcome.weights,
        )
        if outcome.reason:
            self._log.write("left-out", step=self._step, replicas=outcome.round.left_out, reason=outcome.reason)

    def _change_scope(self, scope: Any) -> None:
        """Enter or leave the sum over everybody; replicas agree at that moment."""
        if scope == "all":
            self._average_state()  # equal gradients keep replicas equal only if their optimizers are equal too
        elif self._total.scope == "all":
            self.refresh()
            if self._flat.tail:  # running statistics were each worker's own so far
                self._comm.broadcast_([self.exchange.anchor[self._flat.length :]])
            self._total.processed = 0
        self._total.scope = scope

    def _states(self) -> Iterator[torch.Tensor]:
        for parameter in (p for group in self._optimizer.param_groups for p in group["params"]):
            for value in self._optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    yield value

    def _zero_state(self) -> None:
        for value in self._states():
            value.zero_()

    def _average_state(self) -> None:
        """The mean over workers; nothing, if some have no state yet."""
        states = list(self._states())
        counts = self._comm.gather(torch.tensor([float(len(states))], dtype=torch.float64)).wait()
        if len(set(counts.view(-1).tolist())) > 1:
            self._zero_state()
            self._log.write("note", text="some optimizers hold no state yet: all start again with an empty one")
            return
        for value in states:
            mean = value.float().div_(self._comm.size)
            self._comm.sum_(mean).wait()
            value.copy_(mean)

    def settle(self) -> None:
        """Make all replicas agree, now: the weighted mean, whatever the outer optimizer; collective."""
        if not (self._several and self.local):
            return
        if self.exchange.under_way:
            self._take_in(self._arrived())
        action = Action(self._total.scope, send=True, wait=True, agree=True)
        self._send(action, plain=True)
        self._take_in(self._arrived())
        self._state = dataclasses.replace(self._state, since=0, age=-1)
        self.forget_time()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model is the anchor: what all replicas agreed on last; the same on every worker."""
        if self._depth or not (self._several and self.local):
            yield
            return
        if self.exchange.under_way:
            self.exchange.arrive()
        own = self._flat.empty()
        self._flat.read(own, 0, self._everything)
        self._fence()
        self._flat.write(self.exchange.anchor, 0, self._everything)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._flat.write(own, 0, self._everything)
            self._fence()
            self.forget_time()

    def finite(self) -> bool:
        """Whether what was agreed on last is finite."""
        return bool(torch.isfinite(self.exchange.anchor[: self._flat.length]).all())

    def state(self) -> dict[str, Any]:
        """What a resume needs and all workers share."""
        if self._depth:
            raise ConfigError("inside pace.consensus() the replicas are set aside: save after it")
        self.forget_time()
        self.exchange.state()
        return {
            "policy": self._policy.name,
            "nodes": [list(part) for part in self._topology.members],
            "state": to_plain(self._state),
            "scope": self._total.scope,
            "step": self._step,
            "settled": not self.exchange.under_way and (not self.local or self._total.processed == 0),
            "anchor": self.exchange.anchor if self.local else None,
            "momentum": self.exchange.momentum,
            "probe": self._probe.state() if self._probe is not None else None,
        }

    def own_state(self) -> dict[str, Any]:
        """What differs between workers: the replica itself, its optimizer, what it has under way."""
        values = self._flat.empty()
        self._flat.read(values, 0, self._everything)
        self._fence()
        return {
            "values": values,
            "optimizer": self._optimizer.state_dict(),
            "exchange": self.exchange.state(),
            "samples": self._total.processed,
            "blocked": self._blocked,
            "sent_delay": self._sent_delay,
            "round": to_plain(self._round) if self._round is not None else None,
        }

    def load(self, state: dict[str, Any], own: dict[str, Any] | None) -> str | None:
        """Go on from a saved state; `own` is this worker's part, if as many workers on the same nodes saved it.

        Returns:
            A sentence if replicas could not be taken over one by one.
        """
        other = state["policy"] != self._policy.name
        if other and not state["settled"]:
            raise CheckpointError(
                f"a run resumes with its own sync policy: the checkpoint has {state['policy']!r}, this run "
                f"{self._policy.name!r}. Call pace.settle() before saving to change it"
            )
        self._step = state["step"]
        if state["momentum"] is not None and self.exchange.momentum is not None:
            self.exchange.momentum.copy_(state["momentum"])
        if other or own is None or state["nodes"] != [list(part) for part in self._topology.members]:
            if state["anchor"] is not None:
                self.exchange.anchor.copy_(state["anchor"])
                self._flat.write(self.exchange.anchor, 0, self._everything)
            if not other:
                self._state = dataclasses.replace(from_plain(SyncState(), state["state"]), since=0, age=-1)
                self._total.scope = state["scope"] if self._several else "all"
            return "saved by other workers or under another sync policy: replicas start from the anchor, in a new round"
        self._state = from_plain(SyncState(), state["state"])
        if self._probe is not None and state.get("probe") is not None:
            self._probe.load(state["probe"])
        self._total.scope = state["scope"]
        self._flat.write(own["values"], 0, self._everything)
        self._optimizer.load_state_dict(own["optimizer"])
        if state["anchor"] is not None:
            self.exchange.anchor.copy_(state["anchor"])
        self.exchange.load(own["exchange"])
        self._total.processed, self._blocked, self._sent_delay = own["samples"], own["blocked"], own["sent_delay"]
        self._round = from_plain(Round(0.0, 0.0, 0.0, ()), own["round"]) if own["round"] is not None else None
        self._fence()
        return None

    def close(self, *, graceful: bool) -> None:
        """End the thread; if graceful, after what is under way has arrived, so that nobody closes a connection in use."""
        self._hook.remove()
        self.exchange.close(graceful=graceful)
