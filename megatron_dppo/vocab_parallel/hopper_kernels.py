"""Hopper kernels: the logits' matrix product with what follows it done on the accumulator, so no logit is stored.

Written in Gluon (Triton's lower level), because the shape of the kernel is what makes it fast. One persistent program a
multiprocessor walks over tiles of 128 tokens by 256 columns. One warp only copies (TMA) hidden and weight tiles into a
ring of shared-memory stages; two warpgroups each multiply 64 of the 128 token rows. They share nothing but the ring, so
while one works on its finished accumulator (exponentials, sums) the other, up to a ring behind, keeps the tensor cores
busy with the remaining stages.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of these functions knows no starred expressions)
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@gluon.jit
def _tile(index, tiles_t, tiles_v, GROUP: gl.constexpr):
    """Tile coordinates: GROUP token tiles by all column tiles, token tiles innermost, so both operands stay in L2."""
    group = index // (GROUP * tiles_v)
    first = group * GROUP
    # At least 1: consumers also ask for tiles past the last, whose coordinates are never used.
    height = gl.maximum(gl.minimum(tiles_t - first, GROUP), 1)
    rest = index - group * GROUP * tiles_v
    return first + rest % height, rest // height


@gluon.jit
def _make_ring(hidden, weight, STAGES: gl.constexpr):
    """Shared-memory stages of both operands, and a pair of barriers each: filled by TMA, emptied by both consumers."""
    ring_h = gl.allocate_shared_memory(hidden.dtype, [STAGES] + hidden.block_type.shape, hidden.layout)
    ring_w = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    return ring_h, ring_w, full, empty


@gluon.jit
def _load_tiles(hidden, weight, ring, tiles_t, tiles_v, steps, GROUP: gl.constexpr):
    """The copying warp: every tile's operands, in the order the consumers want them."""
    ring_h, ring_w, full, empty = ring
    STAGES: gl.constexpr = ring_h.shape[0]
    BYTES: gl.constexpr = (ring_h.shape[1] + ring_w.shape[1]) * ring_h.shape[2] * 2
    count = 0
    for index in range(gl.program_id(0), tiles_t * tiles_v, gl.num_programs(0)):
        tile_t, tile_v = _tile(index, tiles_t, tiles_v, GROUP)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            tma.async_copy_global_to_shared(
                hidden, [tile_t * ring_h.shape[1], step * ring_h.shape[2]], full.index(stage), ring_h.index(stage)
            )
            tma.async_copy_global_to_shared(
                weight, [tile_v * ring_w.shape[1], step * ring_w.shape[2]], full.index(stage), ring_w.index(stage)
            )
            count += 1


@gluon.jit
def _multiply(ring, count, steps, HALF: gl.constexpr, layout: gl.constexpr):
    """One warpgroup's 64 rows of a tile of logits; releases each stage one step after it was read."""
    ring_h, ring_w, full, empty = ring
    STAGES: gl.constexpr = ring_h.shape[0]
    WIDTH: gl.constexpr = ring_w.shape[1]
    acc = gl.zeros([64, WIDTH], gl.float32, layout)
    for step in range(steps):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        acc = warpgroup_mma(
            ring_h.index(stage).slice(64 * HALF, 64), ring_w.index(stage).permute((1, 0)), acc, is_async=True
        )
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # The product before this one is done, so its stage can be refilled.
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
        count += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
    return acc, count


@gluon.jit
def _half_with(value, column):
    """The half of the columns of each row that ``column`` (modulo their number) lies in: one select an element."""
    WIDTH: gl.constexpr = value.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    low, high = value.reshape([64, 2, WIDTH]).permute(0, 2, 1).split()
    low = gl.convert_layout(low, layout, assert_trivial=True)
    high = gl.convert_layout(high, layout, assert_trivial=True)
    upper = gl.convert_layout(column & WIDTH, gl.SliceLayout(1, layout), assert_trivial=True) != 0
    return gl.where(upper[:, None], high, low)


@gluon.jit
def _pick(acc, column, layout: gl.constexpr):
    """``acc[r, column[r]]`` of ``acc [64, 256]``. Halving takes a third of the steps of a scan."""
    value = _half_with(_half_with(_half_with(_half_with(_half_with(acc, column), column), column), column), column)
    last: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    column = gl.convert_layout(column & 7, gl.SliceLayout(1, last), assert_trivial=True)
    hit = gl.arange(0, 8, gl.SliceLayout(0, last))[None, :] == column[:, None]
    picked = gl.sum(gl.where(hit, value, 0.0), axis=1)
    return gl.convert_layout(picked, gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def _slots_of_tile(first_slot, index, row_in_tile, rows, tiles_t, tiles_v, GROUP: gl.constexpr):
    """Slots ``[slot, end)`` of each row's rising ids that lie in tile ``index``; none past the last tile."""
    tile_t, tile_v = _tile(index, tiles_t, tiles_v, GROUP)
    row = tile_t * 128 + row_in_tile
    inside = (row < rows) & (index < tiles_t * tiles_v)
    at = first_slot + row.to(gl.int64) * (tiles_v + 1) + tile_v
    return gl.load(at, mask=inside, other=0), gl.load(at + 1, mask=inside, other=0)


@gluon.jit
def _first_id(wanted, slot, end, index, row_in_tile, tiles_t, tiles_v, GROUP: gl.constexpr):
    """Offset of each row's slots, and the id and place at ``slot`` where there is one."""
    ids, places, _, _, slots = wanted
    tile_t, _ = _tile(index, tiles_t, tiles_v, GROUP)
    at = (tile_t * 128 + row_in_tile).to(gl.int64) * slots
    found = slot < end
    return at, gl.load(ids + at + slot, mask=found, other=0), gl.load(places + at + slot, mask=found, other=0)


@gluon.jit
def _tile_stats(
    ring, out, wanted, rows, columns, first_column, tiles_t, tiles_v, steps, inverse_temperature,
    HALF: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warpgroup's statistics of each tile's rows, and its wanted logits."""
    scale = inverse_temperature * LOG2_E
    ids, places, first_slot, z, _ = wanted
    WIDTH: gl.constexpr = ring[1].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row_in_tile = gl.arange(0, 64, gl.SliceLayout(1, layout)) + 64 * HALF
    column_in_tile = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    count = 0
    # Wanted ids take two dependent loads: slots two tiles ahead, ids one tile ahead, each behind a whole product.
    stride = gl.num_programs(0)
    begin = gl.program_id(0)
    slot, end = _slots_of_tile(first_slot, begin, row_in_tile, rows, tiles_t, tiles_v, GROUP)
    at, id, place = _first_id(wanted, slot, end, begin, row_in_tile, tiles_t, tiles_v, GROUP)
    next_slot, next_end = _slots_of_tile(first_slot, begin + stride, row_in_tile, rows, tiles_t, tiles_v, GROUP)
    for index in range(begin, tiles_t * tiles_v, stride):
        tile_t, tile_v = _tile(index, tiles_t, tiles_v, GROUP)
        row = tile_t * 128 + row_in_tile
        inside = row < rows
        next_at, next_id, next_place = _first_id(
            wanted, next_slot, next_end, index + stride, row_in_tile, tiles_t, tiles_v, GROUP
        )
        later_slot, later_end = _slots_of_tile(
            first_slot, index + 2 * stride, row_in_tile, rows, tiles_t, tiles_v, GROUP
        )
        acc, count = _multiply(ring, count, steps, HALF, layout)
        if (tile_v + 1) * WIDTH > columns:
            acc = gl.where((column_in_tile < columns - tile_v * WIDTH)[None, :], acc, -1.0e30)
        # Few rows want an id of this tile, hardly any wants two.
        for _ in range(gl.max(end - slot, axis=0)):
            # Rounded as the maximum is on its way to base e, so that the likeliest token's x - max is exactly 0.
            picked = _pick(acc, id - first_column - tile_v * WIDTH, layout) * scale * LN_2
            gl.store(z + at + place, picked, mask=slot < end)
            slot += 1
            id = gl.load(ids + at + slot, mask=slot < end, other=0)
            place = gl.load(places + at + slot, mask=slot < end, other=0)
        slot, end, at, id, place = next_slot, next_end, next_at, next_id, next_place
        next_slot, next_end = later_slot, later_end
        m = gl.max(acc, axis=1) * scale
        shifted = acc * scale - m[:, None]
        p = gl.exp2(shifted)
        base = out + tile_v.to(gl.int64) * rows + row
        plane = tiles_v.to(gl.int64) * rows
        gl.store(base, m, mask=inside)
        gl.store(base + plane, gl.sum(p, axis=1), mask=inside)
        gl.store(base + 2 * plane, gl.sum(p * shifted, axis=1), mask=inside)


@gluon.jit(do_not_specialize=["rows", "columns", "first_column", "slots", "tiles_t", "tiles_v", "steps"])
def tile_stats(
    hidden, weight, out, ids, places, first_slot, z, rows, columns, first_column, slots, tiles_t, tiles_v,
    steps, inverse_temperature, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Statistics of each 256-column tile, and the logits of wanted ids, with
    ``x = hidden weight^T log2(e) / temperature``.

    ``out [3, tiles_v, rows]`` gets ``m = max x``, ``sum 2^(x - m)``, ``sum (x - m) 2^(x - m)``. ``ids [rows, slots]``
    are each row's wanted global ids, rising, and ``places`` where in the row of ``z [rows, slots]`` each one's logit
    (in base e) goes; ``first_slot [rows, tiles_v + 1]`` is the first slot whose id is not below a tile's first column.
    """
    ring = _make_ring(hidden, weight, STAGES)
    wanted = (ids, places, first_slot, z, slots)
    gl.warp_specialize(
        [
            (_tile_stats, (ring, out, wanted, rows, columns, first_column, tiles_t, tiles_v, steps,
                           inverse_temperature, 0, GROUP)),
            (_tile_stats, (ring, out, wanted, rows, columns, first_column, tiles_t, tiles_v, steps,
                           inverse_temperature, 1, GROUP)),
            (_load_tiles, (hidden, weight, ring, tiles_t, tiles_v, steps, GROUP)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit
def _tile_grads(
    ring, staging, out, per_row, rows, first_column, tiles_t, tiles_v, steps, inverse_temperature,
    HALF: gl.constexpr, GROUP: gl.constexpr, WITH_ENTROPY: gl.constexpr,
):  # fmt: skip
    """A warpgroup's logit gradients of each tile, rounded once to the hidden type."""
    token_ids, lses, entropies, grads_logp, grads_entropy = per_row
    WIDTH: gl.constexpr = ring[1].shape[1] // 2
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * WIDTH, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row_in_tile = gl.arange(0, 64, gl.SliceLayout(1, layout)) + 64 * HALF
    column_in_half = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    buffer = staging.index(HALF)
    count = 0
    for index in range(gl.program_id(0), tiles_t * tiles_v, gl.num_programs(0)):
        tile_t, tile_v = _tile(index, tiles_t, tiles_v, GROUP)
        row = tile_t * 128 + row_in_tile
        inside = row < rows
        lse = gl.load(lses + row, mask=inside, other=0.0) * LOG2_E
        own = gl.load(grads_logp + row, mask=inside, other=0.0)
        constant = -own
        slope = own
        if WITH_ENTROPY:
            grad_entropy = gl.load(grads_entropy + row, mask=inside, other=0.0)
            constant -= grad_entropy * gl.load(entropies + row, mask=inside, other=0.0)
            slope = grad_entropy * (-inverse_temperature * LN_2)
        own *= inverse_temperature
        constant *= inverse_temperature
        target = gl.load(token_ids + row, mask=inside, other=-1).to(gl.int32) - first_column - tile_v * (2 * WIDTH)
        has_target = gl.max(((target >= 0) & (target < 2 * WIDTH)).to(gl.int32), axis=0)
        acc, count = _multiply(ring, count, steps, HALF, tile_layout)
        # Half a tile at a time: the accumulator leaves few registers, and the staging buffer holds half a tile.
        low, high = acc.reshape([64, 2, WIDTH]).permute(0, 2, 1).split()
        for part in gl.static_range(2):
            logit = gl.convert_layout(low if part == 0 else high, layout, assert_trivial=True)
            log_p = logit * (inverse_temperature * LOG2_E) - lse[:, None]
            if WITH_ENTROPY:
                grad = gl.exp2(log_p) * (log_p * slope[:, None] + constant[:, None])
            else:
                grad = gl.exp2(log_p) * constant[:, None]
            if has_target != 0:
                grad = gl.where(column_in_half[None, :] + part * WIDTH == target[:, None], grad + own[:, None], grad)
            # The staging buffer is free once the copy before this one has read it.
            tma.store_wait(0)
            buffer.store(grad.to(out.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(
                out, [tile_t * 128 + 64 * HALF, tile_v * (2 * WIDTH) + part * WIDTH], buffer
            )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "first_column", "tiles_t", "tiles_v", "steps"])
def tile_grads(
    hidden, weight, out, token_ids, lses, entropies, grads_logp, grads_entropy, rows, first_column, tiles_t, tiles_v,
    steps, inverse_temperature,
    STAGES: gl.constexpr, GROUP: gl.constexpr, WITH_ENTROPY: gl.constexpr,
):  # fmt: skip
    """Gradients of the logits, ``out [rows, columns]``, with ``z = hidden weight^T / temperature, p = e^(z - lse)``::

        (g (1[token] - p) - g_H p (z - lse + entropy)) / temperature

    from each row's token, lse, entropy, ``g`` and ``g_H`` (``WITH_ENTROPY`` False: the entropy pointers are not read).
    """
    ring = _make_ring(hidden, weight, STAGES)
    staging = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    per_row = (token_ids, lses, entropies, grads_logp, grads_entropy)
    gl.warp_specialize(
        [
            (_tile_grads, (ring, staging, out, per_row, rows, first_column, tiles_t, tiles_v, steps,
                           inverse_temperature, 0, GROUP, WITH_ENTROPY)),
            (_tile_grads, (ring, staging, out, per_row, rows, first_column, tiles_t, tiles_v, steps,
                           inverse_temperature, 1, GROUP, WITH_ENTROPY)),
            (_load_tiles, (hidden, weight, ring, tiles_t, tiles_v, steps, GROUP)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
