"""A gradient in a thousand numbers: enough to tell how far gradients of replicas differ, without sending them.

Value i goes, with a sign that is drawn once, to place i mod WIDTH, and what meets there is added (a count sketch; Charikar, Chen and
Farach-Colton 2002). Squared lengths and inner products keep their mean; they scatter by about sqrt(2 / WIDTH) of themselves, and
differences of sketches are sketches of differences.
"""

from __future__ import annotations

import torch

WIDTH = 1024
_ROWS = 256  # signs are drawn for so many rows, and shifted for every further block of them


class Sketch:
    """Takes the sketch of one step when it is due.

    Attributes:
        due: whether the next step's gradient is to be taken; taking it sets this back.
        values: the newest sketch, on the device it was computed on.
        samples: how many samples its gradient is the mean of, on this worker.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2002)
        self._signs = torch.randint(0, 2, (_ROWS, WIDTH), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        self.due = False
        self.values: torch.Tensor | None = None
        self.samples = 0

    def take(self, pieces: list[torch.Tensor], samples: int) -> None:
        """The gradient of this step, in pieces; every worker has the same pieces in the same order."""
        self.due, self.samples = False, samples
        device = pieces[0].device
        if self._signs.device != device:
            self._signs = self._signs.to(device)
        out = torch.zeros(WIDTH, device=device)
        block = 0
        for piece in pieces:
            flat = piece.detach().reshape(-1)
            for begin in range(0, flat.numel(), _ROWS * WIDTH):
                part = flat[begin : begin + _ROWS * WIDTH].float()
                whole = part.numel() // WIDTH * WIDTH
                signs = self._signs.roll((7 * block, 37 * block), (0, 1)) if block else self._signs
                block += 1
                if whole:
                    rows = part[:whole].view(-1, WIDTH)
                    out.add_((rows * signs[: len(rows)]).sum(0))
                rest = part[whole:]
                if rest.numel():
                    out[: rest.numel()].add_(rest * signs[-1, : rest.numel()])
        self.values = out
