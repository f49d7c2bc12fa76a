"""`dp`: dynamic partition with plain averaging, as printed. Vineeth S. 2021, arXiv 2110.08941.

    p_i <- (p_i / t_i) / sum_j (p_j / t_j)   once per epoch,      g = (1/n) sum_i g_i

with t_i the mean time of forward and backward; loading and communication are left out. The plain mean is *not* the
gradient of the joined batch when shares differ: a sample on a small share counts more. It is here for comparison;
`edp` is the same with the right weights.
"""

from __future__ import annotations

from paceline.policies.balance.rule import EpochRule

DP = EpochRule(name="dp", weighting="mean", clock="compute")
