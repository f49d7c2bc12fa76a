"""The weighted gradient sum, inside DistributedDataParallel's communication hook.

    g = sum_i w_i g_i,      w_i = b_i / B

with g_i the gradient of worker i's mean loss over its b_i samples: the gradient of the mean loss over the joined batch,
for any split. Each bucket is scaled and sent as soon as backward has filled it, so the sum overlaps with backward.

DDP waits for the futures a hook returns when backward ends. We resolve them ourselves, in a callback that autograd runs
at the end of backward just before DDP's own: there the waiting is timed, an error of the network is given a name, and
no Python callback ever hangs on a future of the backend (those that outlive the loop can abort the interpreter).
"""

# No `from __future__ import annotations` here: DDP inspects the annotations of a hook.
from collections.abc import Callable
from typing import Any

import torch

from paceline.comm import EXCHANGING, Comm, Team
from paceline.errors import PacelineError
from paceline.policies.batch.protocol import Needs
from paceline.policies.sync import Scope
from paceline.runtime.batches import each_tensor
from paceline.runtime.compress import HalfSum
from paceline.runtime.meter import Meter
from paceline.runtime.sketch import Sketch

SMALL = (torch.float16, torch.bfloat16)


class _Scaled(torch.autograd.Function):
    """The identity, with its gradient multiplied: what else hangs on the tensor is left alone."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


class WeightedSum:
    """State of the hook: this worker's weight, and the sums under way.

    Usable by itself with any DistributedDataParallel:

        total = WeightedSum(comm)
        total.attach(ddp)
        for batch in ...:
            total.weigh(local / joined)
            loss(ddp(batch)).backward()

    Args:
        comm: the door to the other workers.
        meter: told when gradients are ready and when the sum has arrived.

    Attributes:
        scope: whose gradients are summed: everybody's, the node's (over `team`), or nobody else's.
        mates: the workers on this node.
        processed: samples handed out so far; whoever counts them may set it back.
        backward_step: the step whose gradients were computed last.
        measures: what is told to the meter about gradients, beyond whether they are finite.
        sketch: takes a sketch of the gradient when one is due.
    """

    def __init__(self, comm: Comm, meter: Meter | None = None) -> None:
        self.comm = comm
        self.half: HalfSum | None = None
        self.meter = meter or Meter()
        self.step = -1
        self.samples = 0
        self.processed = 0
        self.backward_step = -1
        self.at_outputs = False
        self.scope: Scope = "all"
        self.team: Team | None = None
        self.mates: tuple[int, ...] = (comm.rank,)
        self._current, self._of_node = 1.0 / comm.size, 1.0
        self.measures: Needs = "nothing"
        self.sketch: Sketch | None = None
        self._held: list[float] = []
        self._under_way: list[
            tuple[Any, torch.futures.Future[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor | None]
        ] = []
        self._alone: list[torch.Tensor] = []
        self._inline = self._first = True

    def attach(self, ddp: Any) -> None:
        """Make `ddp` sum its gradients with these weights."""
        ddp.register_comm_hook(self, weighted_hook)
        ddp.register_forward_pre_hook(self._before_forward)

    def weigh(self, weight: float, step: int = -1, samples: int = 0, of_node: float = 1.0) -> None:
        """The batch just handed out counts `weight` in the sum over everybody, and `weight / of_node` in that of the node."""
        self._current, self.step, self.samples, self._of_node = weight, step, samples, of_node
        self.processed += samples

    def _before_forward(self, ddp: Any, _: Any) -> None:
        if torch.is_grad_enabled() and not ddp.require_backward_grad_sync:
            self._held.append(self._current)  # inside no_sync: sent later, together with others

    def scale_outputs(self, outputs: Any) -> Any:
        """Weight the gradient where it enters the model instead of where it leaves.

        Layers that mix workers in backward (SyncBatchNorm) need gradients that are weighted already. The sum is then
        the plain mean of gradients of n * w_i times each worker's loss.
        """
        factor = self._current * self.comm.size

        found: list[bool] = []

        def scale(tensor: torch.Tensor) -> Any:
            found.append(tensor.requires_grad)
            return _Scaled.apply(tensor, factor) if tensor.requires_grad else tensor

        scaled = each_tensor(outputs, scale)
        if not any(found):
            raise PacelineError(
                f"with SyncBatchNorm the model must return tensors, or lists, tuples or dicts of them, to weight their "
                f"gradients; got {type(outputs).__name__}"
            )
        return scaled

    def release(self) -> None:
        """Forget accumulated weights: somebody else takes care that they are equal."""
        self._held.clear()

    @property
    def weight(self) -> float:
        """The weight of the gradient about to be sent.

        Gradients accumulated over several batches are sent once, with one weight, so the weights must be equal.
        """
        if self.at_outputs:
            return 1.0 / self.comm.size
        if any(weight != self._current for weight in self._held):
            shares = sorted({*self._held, self._current})
            raise PacelineError(
                f"gradients accumulated before a step must come from equal shares: got shares {shares} in "
                f"{len(self._held) + 1} micro-batches. Give the loader accumulate={len(self._held) + 1} so that plans "
                f"change between steps only, and drop_last=True"
            )
        if self.scope == "own":
            return 1.0 if self._current else 0.0
        if self.scope == "node":
            return self._current / self._of_node if self._current else 0.0
        return self._current

    def send(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Scale a flat piece of gradient, start its sum, and promise the result."""
        weight, own = self.weight, None
        if weight == 0.0:
            buffer.zero_()  # not a multiplication: an idle worker's NaN must not spread
        elif self.scope == "all":
            # Weighted at the outputs, a gradient is this many times what it would be by itself; 0 for an idle worker.
            times = self._current * self.comm.size if self.at_outputs else 1.0
            norm = _norm(buffer)
            self.meter.norm(norm / times if times else norm)
            if self.measures == "inner" and times:
                own = buffer / times
            buffer.mul_(weight)
        elif weight != 1.0:  # a replica that is not finite is left out when replicas agree
            buffer.mul_(weight)
        wire = buffer.float() if buffer.dtype in SMALL else buffer
        on_cuda = buffer.device.type == "cuda"
        future = torch.futures.Future(devices=[buffer.device] if on_cuda else None)
        if self.scope == "own":
            self._alone.append(buffer)
            future.set_result(buffer)
            return future
        place = len(self._under_way)
        if self.scope == "node":
            assert self.team is not None
            work: Any = self.team.sum_(wire)
        elif self.half is not None and wire is buffer:
            work = self.half.start(buffer, place)
        else:
            work = self.comm.sum_(wire, place if self.half is None else self.half.lane(place))
        self._under_way.append((work, future, buffer, wire, own))
        return future

    def count(self, numbers: torch.Tensor) -> Callable[[], None]:
        """Start summing plain numbers over whoever gradients are summed over; call what it returns to wait for them."""
        if self.scope == "own":
            return lambda: None
        if self.scope == "node":
            assert self.team is not None
            return self.team.sum_(numbers).wait
        return self.comm.sum_(numbers).wait

    def last_sent(self) -> None:
        """All pieces of this backward are on their way."""
        self.backward_step = self.step
        self.meter.ready()
        self.comm.at(self.step, EXCHANGING)

    def finish(self) -> None:
        """Wait for the sums and hand them over."""
        done, self._under_way = self._under_way, []
        first, self._first = self._first, False
        for work, _, buffer, wire, _ in done:
            work.wait()
            if wire is not buffer:
                buffer.copy_(wire)
        if first and self.half is not None:
            self.half.forget()
        self._held.clear()
        self.meter.summed()
        self.comm.at(self.step, "updating")
        pieces, self._alone = [*self._alone, *(one[2] for one in done)], []
        if self.scope == "all":
            if self.measures != "nothing":
                pairs = [
                    (own.view(-1).float(), buffer.view(-1).float()) for _, _, buffer, _, own in done if own is not None
                ]
                inners = [torch.dot(own, joint) for own, joint in pairs]
                self.meter.gradient([_norm(piece) for piece in pieces], inners)
        elif self.sketch is not None and self.sketch.due:
            self.sketch.take(pieces, self.samples)
        for _, future, buffer, _, _ in done:
            future.set_result(buffer)


def _norm(piece: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(piece, dtype=torch.float32 if piece.dtype in SMALL else None)


def weighted_hook(state, bucket):  # type: ignore[no-untyped-def]
    """The communication hook; `state` is a `WeightedSum`."""
    future = state.send(bucket.buffer())
    if bucket.is_last():
        state.last_sent()
        if state._inline:  # with static_graph DDP's first backward waits before our callback could run
            state._inline = False
            state.finish()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(state.finish)
    return future
