"""Half the bytes on the wire: gradients as bf16, sums in fp32, and nothing lost for good.

With g_i the weighted gradient of worker i, e_i what rounding has taken from it so far, and Q rounding to bf16:

    s_i = Q(g_i + e_i),     e_i <- g_i + e_i - s_i              sent to whoever sums that slice
    S   = Q(sum_i s_i + E), E   <- sum_i s_i + E - S            the slice's sum, sent to everybody

The sum goes in two hops: every worker adds up one slice of everybody's gradient in fp32, in the order of ranks, then hands it
to everybody, so all get the same bits. Both roundings are remembered and made good in later steps (error feedback; Seide et
al. 2014, Karimireddy et al. 2019): what the optimizer gets over many steps adds up to the exact sum. A single step's update is
no longer exact, by up to 2^-8 of each value.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.comm import Comm


class _Piece:
    """What one bucket keeps from step to step: its roundings, and buffers of both hops."""

    def __init__(self, buffer: torch.Tensor, size: int) -> None:
        self.length = buffer.numel()
        part = -(-self.length // size)
        self.mine = torch.zeros(size, part, dtype=torch.bfloat16, device=buffer.device)
        self.theirs = torch.zeros_like(self.mine)
        self.lost = torch.zeros_like(buffer)
        self.total = torch.zeros(part, dtype=buffer.dtype, device=buffer.device)


class _Hops:
    """One sum under way."""

    def __init__(self, half: HalfSum, piece: _Piece, buffer: torch.Tensor, lane: int) -> None:
        self._half, self._piece, self._buffer = half, piece, buffer
        self._first = half.comm.swap(piece.theirs, piece.mine, lane)
        self._second: Any = None

    def arrived(self) -> bool:
        """Whether the first hop is over."""
        return self._first.done()

    def go_on(self) -> None:
        """Add up my slice and start the second hop."""
        piece = self._piece
        self._first.wait()
        for part in piece.theirs:  # in the order of ranks
            piece.total.add_(part)
        rounded = piece.total.bfloat16()
        piece.total.sub_(rounded).nan_to_num_(0.0, 0.0, 0.0)
        piece.mine.copy_(rounded.expand_as(piece.mine))
        self._second = self._half.comm.swap(piece.theirs, piece.mine, self._half.second_lane)

    def wait(self) -> None:
        """The sum is in the buffer."""
        self._half.advance(until=self)
        self._second.wait()
        self._buffer.copy_(self._piece.theirs.view(-1)[: self._piece.length])


class HalfSum:
    """Sums gradients with bf16 on the wire and error feedback; see the equations above.

    Second hops have a lane of their own, where they follow each other in the order of buckets on every worker.

    Args:
        comm: the door to the other workers; at least two lanes are opened.
    """

    second_lane = 1

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._lanes = [lane for lane in range(comm.open_lanes(2)) if lane != self.second_lane]
        self._pieces: dict[tuple[int, int], _Piece] = {}
        self._waiting: list[_Hops] = []

    def lane(self, place: int) -> int:
        """A lane for a first hop, or for a sum that is not compressed: never that of second hops."""
        return self._lanes[place % len(self._lanes)]

    def forget(self) -> None:
        """Forget what is owed: DDP has laid its buckets out anew, and values lie elsewhere."""
        self._pieces.clear()

    def start(self, buffer: torch.Tensor, place: int) -> _Hops:
        """Round a weighted gradient and send it off; `place` is its number in this backward."""
        key = place, buffer.numel()
        if key not in self._pieces:
            self._pieces[key] = _Piece(buffer, self.comm.size)
        piece = self._pieces[key]
        sent = piece.mine.view(-1)[: piece.length]
        piece.lost.add_(buffer)
        sent.copy_(piece.lost)
        piece.lost.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)  # an overflow is sent, but must not stay
        hops = _Hops(self, piece, buffer, self.lane(place))
        self._waiting.append(hops)
        self.advance()
        return hops

    def advance(self, until: _Hops | None = None) -> None:
        """Start second hops, in order: of sums whose first hop is over, and of all up to `until`."""
        while self._waiting and (self._waiting[0].arrived() or until in self._waiting):
            self._waiting.pop(0).go_on()
