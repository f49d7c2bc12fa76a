"""`dbs`: Dynamic Batch Size, as printed. Ye et al. 2020, arXiv 2007.11831, section 3 (successor: DLB, TETCI 2022).

    p_i <- (p_i / t_i) / sum_j (p_j / t_j)   once per epoch,      g = sum_i (b_i / B) g_i

with t_i the wall time of the epoch's loop (data loading and optimizer included) less the time blocked in
all-reduce. B is constant, so the learning rate is untouched; the first epoch is an equal split.
"""

from __future__ import annotations

from paceline.policies.balance.rule import EpochRule

DBS = EpochRule(name="dbs", weighting="share", clock="wall")
