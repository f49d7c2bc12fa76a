"""Which workers are on which node: as declared, or by the names of their nodes or hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """Nodes and the workers on them.

    Args:
        names: of the nodes.
        members: the workers on each, in order.
    """

    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]

    @property
    def shards(self) -> int:
        """How many workers of every node can take part in an exchange between nodes."""
        return min(len(part) for part in self.members)

    def node_of(self, rank: int) -> int:
        """The number of a worker's node."""
        return next(node for node, part in enumerate(self.members) if rank in part)

    def __str__(self) -> str:
        workers = sum(len(part) for part in self.members)
        parts = "; ".join(
            f"{name}: {', '.join(map(str, part))}" for name, part in zip(self.names, self.members, strict=True)
        )
        return f"{workers} workers on {len(self.members)} nodes ({parts})"


def by_label(labels: Sequence[str]) -> Topology:
    """Workers with the same label are on the same node.

    >>> str(by_label(["a", "a", "b"]))
    '3 workers on 2 nodes (a: 0, 1; b: 2)'
    """
    names = tuple(dict.fromkeys(labels))
    return Topology(names, tuple(tuple(rank for rank, label in enumerate(labels) if label == name) for name in names))


def declared(nodes: str | Sequence[Sequence[int]], size: int) -> Topology:
    """From "2,2" (workers on each node, in order) or [[0, 2], [1, 3]].

    >>> declared("1,2", 3).members
    ((0,), (1, 2))

    Raises:
        ConfigError: it does not cover every worker once.
    """
    if isinstance(nodes, str):
        try:
            counts = [int(part) for part in nodes.split(",")]
        except ValueError:
            raise ConfigError(f"nodes must be numbers of workers, as in '2,2'; got {nodes!r}") from None
        if min(counts) < 1:
            raise ConfigError(f"every node must have at least one worker; got nodes={nodes!r}")
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        members = tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))
    else:
        members = tuple(tuple(int(rank) for rank in part) for part in nodes)
    listed = [rank for part in members for rank in part]
    missing = sorted(set(range(size)) - set(listed))
    strange = sorted(set(listed) - set(range(size)))
    twice = sorted({rank for rank in listed if listed.count(rank) > 1})
    if missing or strange or twice or not all(members):
        problem = (
            f"{missing} are on no node"
            if missing
            else f"{strange} do not exist"
            if strange
            else f"{twice} are on several nodes"
            if twice
            else "a node has none"
        )
        raise ConfigError(f"nodes must name each of the {size} workers once: workers {problem}; got nodes={nodes!r}")
    return Topology(tuple(f"node-{number}" for number in range(len(members))), members)
