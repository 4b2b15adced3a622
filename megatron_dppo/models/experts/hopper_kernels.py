"""The weight gradients of all experts in one Hopper kernel, added into float32 as the accumulators come out.

Written in Gluon (Triton's lower level), in the shape of `megatron_dppo.vocab_parallel.hopper_kernels`. One persistent
program a multiprocessor walks over tiles of 128 rows by 256 columns of all experts' gradients. One warp only copies
(TMA) the expert's tokens, 64 at a time, into a ring of shared-memory stages; two warpgroups multiply 64 rows each. They
share nothing but the ring, so while one adds its accumulator to memory the other keeps the tensor cores busy.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 (the compiler of these functions knows no starred expressions)
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

FAR = gl.constexpr(1 << 30)
"""Rows of a ragged descriptor: see `ragged_rows`."""


@builtin
def _async_add_shared_to_global(descriptor, coordinates, source, _semantic=None):
    """`tma.async_copy_shared_to_global` that adds: Gluon's Hopper module has no name for it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit
def _tile(index, ends, tiles, tiles_n, tiles_k):
    """Expert, row tile and column tile (row tiles innermost: they share the columns' tokens in L2), first and last
    token; some tile past the last."""
    index = gl.minimum(index, tiles - 1)
    expert = index // (tiles_n * tiles_k)
    rest = index % (tiles_n * tiles_k)
    start = gl.load(ends + expert - 1, mask=expert > 0, other=0)
    return expert, rest % tiles_n, rest // tiles_n, start, gl.load(ends + expert)


@gluon.jit
def _load_tokens(dy, x, ring, ends, tiles, tiles_n, tiles_k):
    """The copying warp: every tile's tokens, in the order the multiplying warpgroups want them.

    Tokens of the next expert in the last stage would be added to this one's gradient: `dy` is read through a ragged
    descriptor, which has zeros there.
    """
    low, high, ring_x, full, empty = ring
    STAGES: gl.constexpr = ring_x.shape[0]
    DEPTH: gl.constexpr = ring_x.shape[1]
    BYTES: gl.constexpr = DEPTH * (128 + ring_x.shape[2]) * 2
    count = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, tile_n, tile_k, start, stop = _tile(index, ends, tiles, tiles_n, tiles_k)
        for step in range((stop - start + DEPTH - 1) // DEPTH):
            stage = count % STAGES
            barrier = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(barrier, BYTES)
            row = FAR - (stop - start) + step * DEPTH
            tma.async_copy_global_to_shared(dy, [FAR, stop, row, tile_n * 128], barrier, low.index(stage))
            tma.async_copy_global_to_shared(dy, [FAR, stop, row, tile_n * 128 + 64], barrier, high.index(stage))
            tma.async_copy_global_to_shared(
                x, [start + step * DEPTH, tile_k * ring_x.shape[2]], barrier, ring_x.index(stage)
            )
            count += 1


@gluon.jit
def _halves(acc, WIDTH: gl.constexpr):
    """The left and the right `WIDTH` columns of an accumulator of twice as many."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    low, high = acc.reshape([64, 2, WIDTH]).permute(0, 2, 1).split()
    low = gl.convert_layout(low, layout, assert_trivial=True)
    return low, gl.convert_layout(high, layout, assert_trivial=True)


@gluon.jit
def _add_products(ring, staging, out, ends, tiles, tiles_n, tiles_k, HALF: gl.constexpr):
    """A warpgroup's 64 rows of each tile: multiplied, and added to the gradient by the copy engine."""
    low, high, ring_x, full, empty = ring
    STAGES: gl.constexpr = ring_x.shape[0]
    DEPTH: gl.constexpr = ring_x.shape[1]
    WIDTH: gl.constexpr = ring_x.shape[2]
    PART: gl.constexpr = WIDTH // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat_out: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    ring_dy = high if HALF else low
    buffer = staging.index(HALF)
    count = 0
    coming = gl.program_id(0)
    next_expert, next_n, next_k, next_start, next_stop = _tile(coming, ends, tiles, tiles_n, tiles_k)
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, tile_n, tile_k, start, stop = next_expert, next_n, next_k, next_start, next_stop
        coming += gl.num_programs(0)
        # Behind a whole product, which hides the loads.
        next_expert, next_n, next_k, next_start, next_stop = _tile(coming, ends, tiles, tiles_n, tiles_k)
        if stop > start:
            acc = gl.zeros([64, WIDTH], gl.float32, layout)
            for step in range((stop - start + DEPTH - 1) // DEPTH):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                dy = ring_dy.index(stage)._reinterpret(ring_x.dtype, [DEPTH, 64], flat).permute((1, 0))
                acc = warpgroup_mma(dy, ring_x.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                # The product before this one is done, so its stage can be refilled.
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
                count += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
            # One adder for every number, so the order of additions is fixed.
            left, right = _halves(acc, WIDTH // 2)
            for part in gl.static_range(4):
                first, second = _halves(left if part < 2 else right, PART)
                # The buffer is free once the copy before this one has read it.
                tma.store_wait(0)
                buffer._reinterpret(gl.float32, [64, PART], flat_out).store(second if part % 2 else first)
                fence_async_shared()
                _async_add_shared_to_global(
                    out, [expert, tile_n * 128 + 64 * HALF, tile_k * WIDTH + part * PART], buffer
                )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "tiles_n", "tiles_k"])
def add_weight_gradients(dy, x, out, ends, tiles, tiles_n, tiles_k, STAGES: gl.constexpr):
    """``out[e] += dy[e's tokens]^T x[e's tokens]``.

    dy      ragged descriptor (`grouped.ragged_rows`) of `[tokens, rows]`, blocks `[64, 64]`
    x       descriptor of `[tokens, columns]`, blocks `[64, 256]`
    out     descriptor of float32 `[experts, rows, columns]`, blocks `[1, 64, 64]`
    ends    int32 `[experts]`: where each expert's tokens end
    """
    low = gl.allocate_shared_memory(dy.dtype, [STAGES] + dy.block_type.shape, dy.layout)
    high = gl.allocate_shared_memory(dy.dtype, [STAGES] + dy.block_type.shape, dy.layout)
    ring_x = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout)
    staging = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    ring = (low, high, ring_x, full, empty)
    gl.warp_specialize(
        [
            (_add_products, (ring, staging, out, ends, tiles, tiles_n, tiles_k, 0)),
            (_add_products, (ring, staging, out, ends, tiles, tiles_n, tiles_k, 1)),
            (_load_tokens, (dy, x, ring, ends, tiles, tiles_n, tiles_k)),
        ],
        [4, 1],
        [232, 40],
    )
