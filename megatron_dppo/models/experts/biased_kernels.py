"""Triton kernels of `megatron_dppo.models.experts.biased`.

Rows are sorted by expert. A program takes a tile: up to ROWS rows of one expert, counted expert by expert, and walks
along them. EXPERTS is `experts` rounded up to a power of two.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def tiles_of_experts(ends, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Of each expert: its number, first row, the row behind its last, its tiles, and the tile behind its last."""
    expert = tl.arange(0, EXPERTS)
    stop = tl.load(ends + expert, mask=expert < experts, other=0)
    start = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = (stop - start + ROWS - 1) // ROWS
    return expert, start, stop, tiles, tl.cumsum(tiles, 0)


@triton.jit
def rows_of_tile(tile, ends, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """A tile's expert (no such tile: `experts` or more), its first row, and the row behind its expert's last."""
    expert, start, stop, tiles, behind = tiles_of_experts(ends, experts, EXPERTS, ROWS)
    mine = tl.sum((behind <= tile).to(tl.int32), 0)
    here = expert == mine
    first = tl.sum(tl.where(here, start + (tile - (behind - tiles)) * ROWS, 0), 0)
    return mine, first, tl.sum(tl.where(here, stop, 0), 0)


@triton.jit
def _clamped(gate_up, bias, at, column, mask, inside, width, clamp):
    """Gate and up with their biases; gate at most `clamp`, up at least its negative and at most it. NaN stays."""
    gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
    gate += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    up = tl.load(gate_up + at + width, mask=mask, other=0.0).to(tl.float32)
    up += tl.load(bias + width + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    every: tl.constexpr = tl.PropagateNan.ALL
    return gate, up, tl.minimum(gate, clamp, propagate_nan=every), tl.clamp(up, -clamp, clamp, propagate_nan=every)


@triton.jit
def activation(
    gate_up, bias, probability, out, clamp, offset, ends, width,
    experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`out [rows, width] = gate sigmoid(1.702 gate) (up + offset) probability`."""
    mine, first, stop = rows_of_tile(tl.program_id(0), ends, experts, EXPERTS, ROWS)
    if mine < experts:
        row = first + tl.arange(0, ROWS)
        weight = tl.load(probability + row, mask=row < stop, other=0.0).to(tl.float32)
        bias += mine.to(tl.int64) * (2 * width)
        for begin in range(0, width, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = column < width
            mask = (row < stop)[:, None] & inside[None, :]
            at = row.to(tl.int64)[:, None] * (2 * width) + column[None, :]
            _, _, gate, up = _clamped(gate_up, bias, at, column, mask, inside, width, clamp)
            value = gate * tl.sigmoid(1.702 * gate) * (up + offset) * weight[:, None]
            place = out + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(place, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def activation_backward(
    grad, gate_up, bias, probability, d_gate_up, d_probability, sums, clamp, offset, ends, width,
    experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of `activation`'s inputs; of the biases the sum over each tile, `sums [tiles, 2 width]`."""
    tile = tl.program_id(0)
    mine, first, stop = rows_of_tile(tile, ends, experts, EXPERTS, ROWS)
    if mine < experts:
        row = first + tl.arange(0, ROWS)
        weight = tl.load(probability + row, mask=row < stop, other=0.0).to(tl.float32)
        bias += mine.to(tl.int64) * (2 * width)
        sums += tile.to(tl.int64) * (2 * width)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, width, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = column < width
            mask = (row < stop)[:, None] & inside[None, :]
            at = row.to(tl.int64)[:, None] * (2 * width) + column[None, :]
            raw_gate, raw_up, gate, up = _clamped(gate_up, bias, at, column, mask, inside, width, clamp)
            place = grad + row.to(tl.int64)[:, None] * width + column[None, :]
            outer = tl.load(place, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(1.702 * gate)
            gated, lifted = gate * sigmoid, up + offset
            total += outer * gated * lifted
            inner = outer * weight[:, None]
            d_gate = inner * lifted * sigmoid * (1.0 + 1.702 * (gate - gated))
            d_gate = tl.where(raw_gate > clamp, 0.0, d_gate)
            d_up = tl.where(tl.abs(raw_up) > clamp, 0.0, inner * gated)
            tl.store(d_gate_up + at, d_gate.to(d_gate_up.dtype.element_ty), mask=mask)
            tl.store(d_gate_up + at + width, d_up.to(d_gate_up.dtype.element_ty), mask=mask)
            tl.store(sums + column, tl.sum(d_gate, 0), mask=inside)
            tl.store(sums + width + column, tl.sum(d_up, 0), mask=inside)
        tl.store(d_probability + row, tl.sum(total, 1).to(d_probability.dtype.element_ty), mask=row < stop)


@triton.jit
def add_bias(
    y, bias, probability, ends, width, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """`y [rows, width] += bias probability`, in place."""
    mine, first, stop = rows_of_tile(tl.program_id(0), ends, experts, EXPERTS, ROWS)
    if mine < experts:
        row = first + tl.arange(0, ROWS)
        weight = tl.load(probability + row, mask=row < stop, other=0.0).to(tl.float32)
        bias += mine.to(tl.int64) * width
        for begin in range(0, width, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            mask = (row < stop)[:, None] & (column < width)[None, :]
            at = y + row.to(tl.int64)[:, None] * width + column[None, :]
            share = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :] * weight[:, None]
            tl.store(at, (tl.load(at, mask=mask, other=0.0).to(tl.float32) + share).to(y.dtype.element_ty), mask=mask)


@triton.jit
def add_bias_backward(
    grad, bias, probability, d_probability, sums, ends, width,
    experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of `add_bias`'s bias, summed over each tile (`sums [tiles, width]`), and of the probability."""
    tile = tl.program_id(0)
    mine, first, stop = rows_of_tile(tile, ends, experts, EXPERTS, ROWS)
    if mine < experts:
        row = first + tl.arange(0, ROWS)
        weight = tl.load(probability + row, mask=row < stop, other=0.0).to(tl.float32)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, width, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = column < width
            mask = (row < stop)[:, None] & inside[None, :]
            outer = tl.load(grad + row.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)
            outer = outer.to(tl.float32)
            own = tl.load(bias + mine.to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
            total += outer * own[None, :]
            tl.store(sums + tile.to(tl.int64) * width + column, tl.sum(outer * weight[:, None], 0), mask=inside)
        tl.store(d_probability + row, tl.sum(total, 1).to(d_probability.dtype.element_ty), mask=row < stop)


@triton.jit
def sum_tiles(
    sums, out, ends, width, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """`out [experts, width]`: the sum of `sums [tiles, width]` over each expert's tiles. Program: (expert, columns)."""
    mine = tl.program_id(0)
    expert, _, _, tiles, behind = tiles_of_experts(ends, experts, EXPERTS, ROWS)
    stop = tl.sum(tl.where(expert == mine, behind, 0), 0)
    first = stop - tl.sum(tl.where(expert == mine, tiles, 0), 0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(first, stop, ROWS):
        tile = begin + tl.arange(0, ROWS)
        mask = (tile < stop)[:, None] & (column < width)[None, :]
        total += tl.load(sums + tile.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)
    tl.store(out + mine.to(tl.int64) * width + column, tl.sum(total, 0), mask=column < width)
