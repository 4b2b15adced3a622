"""Triton kernel of the adapters of all experts of a layer."""

# mypy: ignore-errors
import triton
import triton.language as tl

from megatron_dppo.models.experts.biased_kernels import rows_of_tile


@triton.jit
def add_low_rank(
    out, low, factor, ends, width, of_expert, of_rank, of_column, low_width, part,
    experts, EXPERTS: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`out[t, n] += sum_r low[t, (n // part) RANK + r] factor[e, r, n]` for the rows t of every expert e, in place.

        out     `[rows, width]`, low `[rows, low_width]`: both contiguous
        factor  element (e, r, n) is `of_expert e + of_rank r + of_column n` behind its start
        ends    int32 `[experts]`: one past each expert's last row
        part    columns of out that share columns of low

    Program (column block, tile): blocks of COLUMNS are counted part by part, tiles of ROWS rows expert by expert.
    EXPERTS is `experts` rounded up to a power of two, PADDED likewise RANK, but 16 to 128: the rank in such blocks.
    """
    mine, first, stop = rows_of_tile(tl.program_id(1), ends, experts, EXPERTS, ROWS)
    if mine < experts:
        row = first + tl.arange(0, ROWS)
        blocks = (part + COLUMNS - 1) // COLUMNS
        which = tl.program_id(0) // blocks
        place = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
        column = which * part + place
        inside = (row < stop)[:, None] & (place < part)[None, :]
        at = out + row.to(tl.int64)[:, None] * width + column[None, :]
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        for begin in range(0, RANK, PADDED):
            inner = begin + tl.arange(0, PADDED)
            left = tl.load(
                low + row.to(tl.int64)[:, None] * low_width + which * RANK + inner[None, :],
                mask=(row < stop)[:, None] & (inner < RANK)[None, :],
                other=0.0,
            )
            right = tl.load(
                factor + mine.to(tl.int64) * of_expert + inner[:, None] * of_rank + column[None, :] * of_column,
                mask=(inner < RANK)[:, None] & (place < part)[None, :],
                other=0.0,
            )
            total = tl.dot(left, right, total)
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)
