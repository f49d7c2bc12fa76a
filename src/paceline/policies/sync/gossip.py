"""`gossip`: every F steps each worker mixes its parameters with its neighbours' on a graph; nobody waits for everybody (D-PSGD; Lian
et al. 2017).

    x_i <- sum_j P_ij x_j,       P_ij = min(1 / d_i, n_j / (n_i d_j)) for neighbours,     P_ii = what is left

with d the number of neighbours, oneself included, and n the samples a worker has used: Metropolis-Hastings weights. They leave the mean
over workers, weighted by samples, as it was, and lead all workers there. (Without oneself two workers would swap models for ever.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.policies.sync.protocol import Action, Moment, Scope, SyncState, Terms, check_whole

GRAPHS = ("ring", "torus", "complete")
Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Gossip:
    """Mixing with neighbours.

    Args:
        every: F, steps between two mixings; 2 in RCD-SGD.
        graph: "ring", "torus" or "complete".
        edges: a graph of one's own, as pairs of workers; instead of `graph`.
    """

    every: int = 2
    graph: str = "ring"
    edges: Edges | None = None

    name = "gossip"
    terms = Terms(level="worker")

    def __post_init__(self) -> None:
        check_whole("every (F)", self.every, 1)
        if self.graph not in GRAPHS:
            raise ConfigError(
                f"graph must be one of {', '.join(GRAPHS)}, or give edges=((0, 1), (1, 2)); got {self.graph!r}"
            )

    def init(self) -> tuple[Scope, SyncState]:
        """Nobody else's gradients."""
        return "own", SyncState(every=self.every)

    def update(self, seen: Moment, state: SyncState) -> tuple[Action, SyncState]:
        """Mix every F steps."""
        since = state.since + 1
        due = since >= self.every
        after = SyncState(phase=state.phase, every=state.every, since=0 if due else since)
        return Action("own", send=due, wait=due), after

    def links(self, size: int) -> Edges:
        """The graph of so many workers: each edge once.

        Raises:
            ConfigError: it does not reach every worker, or names one that does not exist.
        """
        found = (
            tuple(sorted({_ordered(a, b) for a, b in self.edges}))
            if self.edges is not None
            else _named(self.graph, size)
        )
        for a, b in found:
            if not 0 <= a < b < size:
                raise ConfigError(f"an edge joins two workers of 0 .. {size - 1}; got {(a, b)}")
        reached, frontier = {0}, [0]
        while frontier:
            here = frontier.pop()
            for other in neighbours(found, here):
                if other not in reached:
                    reached.add(other)
                    frontier.append(other)
        if len(reached) < size:
            missing = sorted(set(range(size)) - reached)
            raise ConfigError(
                f"the graph must join all workers, or they never agree: no way leads from worker 0 to {missing}"
            )
        return found


def _ordered(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def _named(graph: str, size: int) -> Edges:
    if graph == "complete":
        return tuple((a, b) for a in range(size) for b in range(a + 1, size))
    if graph == "ring":
        pairs = [(worker, (worker + 1) % size) for worker in range(size)]
    else:
        rows = max(r for r in range(1, int(size**0.5) + 1) if size % r == 0)
        columns = size // rows
        pairs = []
        for worker in range(size):
            row, column = divmod(worker, columns)
            pairs.append((worker, row * columns + (column + 1) % columns))
            pairs.append((worker, (row + 1) % rows * columns + column))
    return tuple(sorted({_ordered(a, b) for a, b in pairs if a != b}))


def neighbours(edges: Edges, worker: int) -> list[int]:
    """Who a worker is joined to."""
    return [b if a == worker else a for a, b in edges if worker in (a, b)]


def rounds(edges: Edges) -> list[list[tuple[int, int]]]:
    """Edges in groups in which every worker has at most one: a group's exchanges all happen at once.

    >>> rounds(((0, 1), (1, 2), (0, 2)))
    [[(0, 1)], [(1, 2)], [(0, 2)]]
    """
    groups: list[list[tuple[int, int]]] = []
    for edge in edges:
        for group in groups:
            if not any(set(edge) & set(other) for other in group):
                group.append(edge)
                break
        else:
            groups.append([edge])
    return groups


def mixing(own: float, degree: int, others: Sequence[tuple[float, int]]) -> tuple[float, list[float]]:
    """This worker's weight, and that of each neighbour.

    Args:
        own: samples this worker has used.
        degree: how many neighbours it has.
        others: samples and number of neighbours of each neighbour that counts.

    >>> mixing(10, 1, [(10, 1)])
    (0.5, [0.5])
    """
    most = 1.0 / (degree + 1)
    weights = [min(most, samples / (own * (other + 1))) if own > 0 else most for samples, other in others]
    return 1.0 - sum(weights), weights
