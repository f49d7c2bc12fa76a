"""`augmented`: the inner-product test, and that the gradient does not stray sideways (Bollapragada, Byrd and Nocedal 2018).

    Var_i(g_i - <g_i, g> g / ||g||^2) / B <= nu^2 ||g||^2

The larger of both batches is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.policies.batch.inner_product import InnerProduct, across, check_positive, over
from paceline.policies.batch.protocol import Gradients


@dataclass(frozen=True, slots=True)
class Augmented(InnerProduct):
    """Both tests.

    Args:
        theta: of the inner-product test.
        nu: how far the gradient may stray, in its own lengths; tan(80 degrees) as published.
    """

    nu: float = 5.84

    name = "augmented"

    def __post_init__(self) -> None:
        check_positive("theta", self.theta)
        check_positive("nu", self.nu)

    def wanted(self, seen: Gradients) -> tuple[float, str]:
        """The larger of both."""
        # Named, not super(): a dataclass with slots is a new class, which super() does not know.
        needed, reason = InnerProduct.wanted(self, seen)
        sideways = over(across(seen), self.nu**2 * seen.joint, seen)
        if sideways <= needed:
            return needed, reason
        return sideways, f"across the gradient the variance asks for {math.ceil(sideways)} samples at nu={self.nu:g}"
