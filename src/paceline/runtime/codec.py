"""How a change of parameters is written on the wire: fp32, bf16, or int8 with a scale for every block."""

from __future__ import annotations

from typing import Protocol

import torch

BLOCK = 256


class Codec(Protocol):
    """Writes fp32 values as bytes and back. `num_bytes(n)` bytes hold n values."""

    exact: bool

    def num_bytes(self, count: int) -> int:
        """Bytes for `count` values."""
        ...

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write fp32 `values` into the bytes `out`."""
        ...

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Read bytes into fp32 `out`."""
        ...


class Full:
    """fp32: 4 bytes a value."""

    exact = True

    def num_bytes(self, count: int) -> int:
        """Four each."""
        return 4 * count

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """As they are."""
        out.view(torch.float32).copy_(values)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """As they are."""
        out.copy_(data.view(torch.float32))


class Half:
    """bf16: 2 bytes a value, 8 bits of mantissa."""

    exact = False

    def num_bytes(self, count: int) -> int:
        """Two each, rounded up to what a row needs to stay aligned."""
        return 2 * count + (-2 * count) % 4

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Round."""
        out.view(torch.bfloat16)[: values.numel()].copy_(values)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Widen."""
        out.copy_(data.view(torch.bfloat16)[: out.numel()])


class Int8:
    """int8: a byte a value, and an fp32 scale for every 256 of them."""

    exact = False

    def num_bytes(self, count: int) -> int:
        """One each in whole blocks, and the scales."""
        blocks = -(-count // BLOCK)
        return blocks * (BLOCK + 4)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Scale every block by its largest value."""
        blocks = -(-values.numel() // BLOCK)
        padded = torch.nn.functional.pad(values, (0, blocks * BLOCK - values.numel())).view(blocks, BLOCK)
        scale = padded.abs().amax(1, keepdim=True).div_(127.0)
        out[: 4 * blocks].view(torch.float32).copy_(scale.view(-1))
        scale.clamp_(min=torch.finfo(torch.float32).tiny)
        out[4 * blocks :].view(torch.int8).copy_((padded / scale).round_().clamp_(-127, 127).view(-1))

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply by the scales."""
        blocks = -(-out.numel() // BLOCK)
        scale = data[: 4 * blocks].view(torch.float32).view(blocks, 1)
        values = data[4 * blocks :].view(torch.int8).view(blocks, BLOCK).float().mul_(scale)
        out.copy_(values.view(-1)[: out.numel()])


CODECS: dict[str, Codec] = {"none": Full(), "bf16": Half(), "int8": Int8()}
