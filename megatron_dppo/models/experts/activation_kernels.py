"""Triton kernels of `megatron_dppo.models.experts.activation`."""

# mypy: ignore-errors
import triton
import triton.language as tl

_BLOCK = tl.constexpr(256)
"""Columns that a program takes at a time."""


@triton.jit(do_not_specialize=["rows"])
def forward(gate_up, probability, out, rows, width, ROWS: tl.constexpr):
    """`out [rows, width] = silu(gate) * up * probability`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    weight = tl.load(probability + row, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, width, _BLOCK):
        column = first + tl.arange(0, _BLOCK)
        mask = inside[:, None] & (column < width)[None, :]
        at = gate_up + row.to(tl.int64)[:, None] * (2 * width) + column[None, :]
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + width, mask=mask, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * weight[:, None]
        tl.store(out + row.to(tl.int64)[:, None] * width + column[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def backward(grad, gate_up, probability, d_gate_up, d_probability, rows, width, ROWS: tl.constexpr):
    """Gradients of `forward`'s inputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    weight = tl.load(probability + row, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, _BLOCK], tl.float32)
    for first in range(0, width, _BLOCK):
        column = first + tl.arange(0, _BLOCK)
        mask = inside[:, None] & (column < width)[None, :]
        shift = row.to(tl.int64)[:, None] * (2 * width) + column[None, :]
        outer = tl.load(grad + row.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_up + shift, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + shift + width, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        total += outer * gate * sigmoid * up
        inner = outer * weight[:, None]
        d_gate = inner * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        d_up = inner * gate * sigmoid
        tl.store(d_gate_up + shift, d_gate.to(d_gate_up.dtype.element_ty), mask=mask)
        tl.store(d_gate_up + shift + width, d_up.to(d_gate_up.dtype.element_ty), mask=mask)
    tl.store(d_probability + row, tl.sum(total, axis=1).to(d_probability.dtype.element_ty), mask=inside)
