"""`edp`: dynamic partition with gradients weighted by share, as printed. Vineeth S. 2021, arXiv 2110.08941.

    p_i <- (p_i / t_i) / sum_j (p_j / t_j)   once per epoch,      g = sum_i (b_i / B) g_i

with t_i the mean time of forward and backward; loading and communication are left out, so a worker slowed by its data
is not relieved.
"""

from __future__ import annotations

from paceline.policies.balance.rule import EpochRule

EDP = EpochRule(name="edp", weighting="share", clock="compute")
