"""Whose change counts, and how much: weights by samples, nothing for a replica that is not finite or absurd."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.errors import NonFiniteError


def weigh(
    samples: Sequence[float], lengths: Sequence[float], limit: float
) -> tuple[tuple[float, ...], tuple[int, ...], str]:
    """Weights of replicas in the mean.

    Args:
        samples: how many each has processed since the last exchange.
        lengths: the Euclidean length of each one's change; NaN or infinite if any value in it is.
        limit: more than this many times the median of the others is absurd.

    Returns:
        Weights that sum to 1; who is left out; a sentence about them.

    >>> weigh([30, 10, 20], [1.0, float("nan"), 1.1], 10.0)[:2]
    ((0.6, 0.0, 0.4), (1,))
    """
    finite = [rank for rank, length in enumerate(lengths) if math.isfinite(length)]
    if not finite:
        raise NonFiniteError(
            "parameters must be finite, but those of every replica hold NaN or infinity. Go back to the last checkpoint; look at "
            "the learning rate"
        )
    reasons, out = [], []
    for rank, length in enumerate(lengths):
        if rank not in finite:
            out.append(rank)
            reasons.append(f"replica {rank} is left out and starts again from the anchor: its change is not finite")
            continue
        others = sorted(lengths[other] for other in finite if other != rank and samples[other] > 0)
        typical = others[len(others) // 2] if others else 0.0
        if typical > 0 and length > limit * typical:
            out.append(rank)
            reasons.append(
                f"replica {rank} is left out and starts again from the anchor: its change is {length / typical:.3g} times "
                f"the others', more than {limit:g}"
            )
    counted = [0.0 if rank in out else float(count) for rank, count in enumerate(samples)]
    total = math.fsum(counted)
    if total == 0:  # nobody has processed anything: nothing has changed, and any weights will do
        counted = [0.0 if rank in out else 1.0 for rank in range(len(samples))]
        total = math.fsum(counted)
    return tuple(count / total for count in counted), tuple(out), "; ".join(reasons)


def drift(weights: Sequence[float], lengths: Sequence[float], mean_length: float) -> float:
    """Variance of the counted changes over the squared length of their mean, per replica but one."""
    counted = [(weight, length) for weight, length in zip(weights, lengths, strict=True) if weight > 0]
    if len(counted) < 2:
        return 0.0
    spread = max(0.0, math.fsum(weight * length * length for weight, length in counted) - mean_length * mean_length)
    if spread == 0.0:
        return 0.0
    return spread / (mean_length * mean_length) / (len(counted) - 1) if mean_length > 0 else math.inf
