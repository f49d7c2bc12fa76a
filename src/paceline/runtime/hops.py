"""The way a sum takes between nodes: slices, two hops, and round the node.

Each of the first S workers of a node (S: workers on the smallest node) sums one of S slices with its peers on the other nodes, in
two hops: everybody sums one part, in fp32 and in the order of nodes, and hands it to everybody. Then mates hand their slices
round. Bytes are those of a ring, over as many connections as a node has workers.
"""

from __future__ import annotations

import torch

from paceline.comm import Comm, Team
from paceline.runtime.codec import Codec
from paceline.runtime.topology import Topology

WITHIN = "the exchange within a node"
BETWEEN = "the exchange between nodes"


class NodeSum:
    """Sums over nodes; one at a time. Collective to make.

    Args:
        comm: the door to the other workers.
        topology: who is on which node.

    Attributes:
        node: this worker's node, among itself.
    """

    def __init__(self, comm: Comm, topology: Topology) -> None:
        node = comm.teams(topology.members, WITHIN)
        assert node is not None
        self.node: Team = node
        self._shards, self._several = topology.shards, len(topology.members) > 1
        self._cross = comm.teams(
            [tuple(part[place] for part in topology.members) for place in range(self._shards)],
            f"{BETWEEN} {', '.join(topology.names)}",
        )
        self._buffers: dict[tuple[str, int, int], torch.Tensor] = {}

    def sum_(self, total: torch.Tensor, left: torch.Tensor | None, codec: Codec, *, carries: bool) -> int:
        """Sum over nodes, in place; waits.

        Args:
            total: this node's part, the same on all its workers; becomes the sum.
            left: becomes what rounding has taken from this node's part, on all its workers; None if nothing is rounded.
            codec: what goes over the wire.
            carries: whether `left` shall hold what the second hop rounds off too.

        Returns:
            Bytes this worker sent to other nodes.
        """
        if not self._several:
            return 0
        count, place = total.numel(), self.node.place
        piece = -(-count // self._shards)
        num_bytes = 0
        if self._cross is not None:
            own = slice(min(count, place * piece), min(count, (place + 1) * piece))
            num_bytes = self._two_hops(total[own], None if left is None else left[own], codec, piece, carries)
        if self.node.size > 1:
            self._share(total, piece)
            if left is not None:
                self._share(left, piece)
        return num_bytes

    def _two_hops(self, part: torch.Tensor, left: torch.Tensor | None, codec: Codec, piece: int, carries: bool) -> int:
        assert self._cross is not None
        size, place = self._cross.size, self._cross.place
        each = -(-piece // size)
        width = codec.num_bytes(each)
        mine, theirs = self._buffer("mine", size, width), self._buffer("theirs", size, width)
        value, summed = self._buffer("value", 2, 4 * each).view(torch.float32)
        summed.zero_()
        spans = [slice(min(i * each, part.numel()), min((i + 1) * each, part.numel())) for i in range(size)]
        for i, span in enumerate(spans):
            value.zero_()[: span.stop - span.start] = part[span]
            codec.encode(value, mine[i])
            if left is not None:
                codec.decode(mine[i], value)
                left[span] = part[span] - value[: span.stop - span.start]
        self._cross.swap(theirs, mine).wait()
        for row in theirs:  # in the order of nodes
            codec.decode(row, value)
            summed.add_(value)
        codec.encode(summed, mine[0])
        if left is not None and carries:
            codec.decode(mine[0], value)
            own = spans[place]
            left[own] += (summed - value)[: own.stop - own.start]
        mine[1:] = mine[0]
        self._cross.swap(theirs, mine).wait()
        for row, span in zip(theirs, spans, strict=True):
            codec.decode(row, value)
            part[span] = value[: span.stop - span.start]
        return 2 * (size - 1) * width

    def _share(self, values: torch.Tensor, piece: int) -> None:
        """Everybody on the node gets the slices of those who summed them."""
        place, count = self.node.place, values.numel()
        mine = self._buffer("share", self.node.size, 4 * piece).view(torch.float32)
        theirs = self._buffer("shared", self.node.size, 4 * piece).view(torch.float32)
        if place < self._shards:
            own = values[min(count, place * piece) : min(count, (place + 1) * piece)]
            mine[:, : own.numel()] = own
        self.node.swap(theirs, mine).wait()
        for number in range(self._shards):
            span = slice(min(count, number * piece), min(count, (number + 1) * piece))
            values[span] = theirs[number, : span.stop - span.start]

    def _buffer(self, name: str, rows: int, width: int) -> torch.Tensor:
        key = name, rows, width
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(rows, width, dtype=torch.uint8)
        return self._buffers[key]
