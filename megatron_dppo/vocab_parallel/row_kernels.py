"""Small Triton kernels around the Hopper ones: sorting wanted ids for the forward, folding its tile statistics, and the
entries of the top K in the backward's gradients."""

# mypy: ignore-errors
import triton
import triton.language as tl

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["rows", "tiles"])
def merge_tiles(tiles_ptr, out_ptr, rows, tiles, BLOCK_TILES: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Fold ``[3, tiles, rows]`` statistics in base 2 into ``[3, rows]`` in base e, tiles in order (see ``merge``)."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    plane = tiles.to(tl.int64) * rows
    m = tl.full([BLOCK_ROWS], -1.0e30, tl.float32)
    s = tl.zeros([BLOCK_ROWS], tl.float32)
    d = tl.zeros([BLOCK_ROWS], tl.float32)
    for first in range(0, tiles, BLOCK_TILES):
        tile = first + tl.arange(0, BLOCK_TILES)
        mask = (tile < tiles)[:, None] & (row < rows)[None, :]
        at = tiles_ptr + tile.to(tl.int64)[:, None] * rows + row[None, :]
        # A large finite stand-in for -inf: 0 * (-inf) would be NaN.
        tile_m = tl.load(at, mask=mask, other=-1.0e30)
        tile_s = tl.load(at + plane, mask=mask, other=0.0)
        tile_d = tl.load(at + 2 * plane, mask=mask, other=0.0)
        new_m = tl.maximum(m, tl.max(tile_m, axis=0))
        shift = tile_m - new_m[None, :]
        weight = tl.exp2(shift)
        old_shift = m - new_m
        old_weight = tl.exp2(old_shift)
        d = old_weight * (d + old_shift * s) + tl.sum(weight * (tile_d + shift * tile_s), axis=0)
        s = old_weight * s + tl.sum(weight * tile_s, axis=0)
        m = new_m
    inside = row < rows
    tl.store(out_ptr + row, m * _LN_2, mask=inside)
    tl.store(out_ptr + rows + row, s, mask=inside)
    tl.store(out_ptr + 2 * rows + row, d * _LN_2, mask=inside)


@triton.jit(do_not_specialize=["rows", "slots", "tiles", "start", "columns", "vocab_size"])
def sort_ids(
    wanted_ptr,
    ids_ptr,
    places_ptr,
    first_slot_ptr,
    fault_ptr,
    rows,
    slots,
    tiles,
    start,
    columns,
    vocab_size,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Sort each row of ``wanted [rows, slots]``: ``ids`` rising, ``places`` where each one stood, and
    ``first_slot [rows, tiles + 1]``, the number of ids below each tile's first column ``start + min(TILE t, columns)``.
    ``fault`` becomes 1 where an id is outside ``[-1, vocab_size)``.
    """
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    slot = tl.arange(0, BLOCK_SLOTS)
    at = row[:, None] * slots + slot[None, :]
    mask = (row < rows)[:, None] & (slot < slots)[None, :]
    # One key holds the id and, in the low bits, its place, so that ids keep their order and places come along.
    wanted = tl.load(wanted_ptr + at, mask=mask, other=1 << 40)
    bad = mask & ((wanted < -1) | (wanted >= vocab_size))
    tl.store(fault_ptr, 1, mask=tl.max(tl.max(bad.to(tl.int32), axis=1), axis=0) != 0)
    key = tl.sort(wanted * BLOCK_SLOTS + slot[None, :], dim=1)
    ids = key // BLOCK_SLOTS
    # Division rounds towards 0, which only -1 (absent) can tell.
    ids = tl.where(key < 0, -1, tl.minimum(ids, 0x7FFFFFFF)).to(tl.int32)
    tl.store(ids_ptr + at, ids, mask=mask)
    tl.store(places_ptr + at, (key & (BLOCK_SLOTS - 1)).to(tl.int32), mask=mask)
    for first in range(0, tiles + 1, BLOCK_TILES):
        tile = first + tl.arange(0, BLOCK_TILES)
        edge = start + tl.minimum(tile * TILE, columns)
        below = tl.sum((ids[:, None, :] < edge[None, :, None]).to(tl.int32), axis=2)
        inside = (row < rows)[:, None] & (tile <= tiles)[None, :]
        tl.store(first_slot_ptr + row[:, None] * (tiles + 1) + tile[None, :], below, mask=inside)


@triton.jit(do_not_specialize=["rows", "slots", "stride", "first_column", "columns"])
def put_gradients(
    out_ptr,
    ids_ptr,
    logp_ptr,
    grads_ptr,
    entropies_ptr,
    totals_ptr,
    grads_entropy_ptr,
    rows,
    slots,
    stride,
    first_column,
    columns,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """Write over the columns of ``out [rows, columns]`` that are wanted ids, from ``logp`` and ``g [rows, slots]``::

        (sum of g over the slots of the same id - total p - g_H p (logp + entropy)) / temperature,   p = exp(logp)

    ``ids [rows, slots]`` are global, in any order; columns start at ``first_column``, and ids outside them are passed
    over. Repeats of an id write the same number. ``total`` is the sum of the row's ``g``; with ``WITH_ENTROPY`` False
    the entropy pointers are not read.
    """
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    slot = tl.arange(0, BLOCK_SLOTS)
    at = row[:, None] * slots + slot[None, :]
    mask = (row < rows)[:, None] & (slot < slots)[None, :]
    ids = tl.load(ids_ptr + at, mask=mask, other=-1)
    own = tl.zeros([BLOCK_ROWS, BLOCK_SLOTS], tl.float32)
    for other in range(slots):
        beside = row * slots + other
        other_id = tl.load(ids_ptr + beside, mask=row < rows, other=-1)
        other_grad = tl.load(grads_ptr + beside, mask=row < rows, other=0.0)
        own += tl.where(ids == other_id[:, None], other_grad[:, None], 0.0)
    logp = tl.load(logp_ptr + at, mask=mask, other=0.0)
    p = tl.exp(logp)
    grad = own - tl.load(totals_ptr + row, mask=row < rows, other=0.0)[:, None] * p
    if WITH_ENTROPY:
        entropy = tl.load(entropies_ptr + row, mask=row < rows, other=0.0)
        grad_entropy = tl.load(grads_entropy_ptr + row, mask=row < rows, other=0.0)
        grad -= grad_entropy[:, None] * p * (logp + entropy[:, None])
    column = ids - first_column
    inside = mask & (column >= 0) & (column < columns)
    value = (grad * inverse_temperature).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * stride + column, value, mask=inside)
