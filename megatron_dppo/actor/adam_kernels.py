"""Triton kernels over many tensors at once: the gradient's norm, and AdamW with the cast of its weights.

A row of `table` describes a tensor: addresses of gradient, master weight, both moments and the 16-bit weight (0: none),
elements, and whether the gradient counts for the norm. `first [tensors + 1]` numbers the blocks: a program finds its
tensor by bisection.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

COLUMNS = 7
BLOCK = 16384
"""Elements of a program."""
_COLUMNS, _BLOCK, _PART = tl.constexpr(COLUMNS), tl.constexpr(BLOCK), tl.constexpr(2048)


@triton.jit
def _tensor_of(first, tensors):
    """The tensor of this program, and where in it the program's block starts."""
    block = tl.program_id(0)
    low = 0
    high = tensors
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(first + middle) <= block:
            low = middle
        else:
            high = middle
    return low, (block - tl.load(first + low)).to(tl.int64) * _BLOCK


@triton.jit
def _at(row, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _elements(row, ALIGNED: tl.constexpr):
    elements = tl.load(row + 5)
    return tl.multiple_of(elements, 16) if ALIGNED else elements


@triton.jit(do_not_specialize=["tensors"])
def square_sums(table, first, sums, tensors, ALIGNED: tl.constexpr):
    """`sums [blocks]`: the squares of each block of the gradients that count, added up in float32."""
    tensor, begin = _tensor_of(first, tensors)
    row = table + tensor * _COLUMNS
    gradient = _at(row, 0, tl.float32, ALIGNED)
    elements = _elements(row, ALIGNED) * tl.load(row + 6)
    total = tl.zeros([_PART], tl.float32)
    for part in range(0, _BLOCK, _PART):
        at = begin + part + tl.arange(0, _PART)
        value = tl.load(gradient + at, mask=at < elements, other=0.0)
        total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["tensors", "lr", "scale", "decay", "correction1", "correction2"])
def adamw(
    table, first, tensors, scale, lr, beta1, beta2, epsilon, decay, correction1, correction2,
    HALF: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One step, with `g = scale * gradient`, in float32::

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        p -= lr (m / correction1 / (sqrt(v / correction2) + epsilon) + decay p)

    and the 16-bit weight (`HALF`) rounded from p.
    """
    tensor, begin = _tensor_of(first, tensors)
    row = table + tensor * _COLUMNS
    gradient, master = _at(row, 0, tl.float32, ALIGNED), _at(row, 1, tl.float32, ALIGNED)
    first_moment, second_moment = _at(row, 2, tl.float32, ALIGNED), _at(row, 3, tl.float32, ALIGNED)
    weight = _at(row, 4, HALF, ALIGNED)
    elements = _elements(row, ALIGNED)
    has_weight = tl.load(row + 4) != 0
    for part in range(0, _BLOCK, _PART):
        at = begin + part + tl.arange(0, _PART)
        mask = at < elements
        g = tl.load(gradient + at, mask=mask, other=0.0) * scale
        p = tl.load(master + at, mask=mask, other=0.0)
        m = beta1 * tl.load(first_moment + at, mask=mask, other=0.0) + (1.0 - beta1) * g
        v = beta2 * tl.load(second_moment + at, mask=mask, other=0.0) + (1.0 - beta2) * g * g
        update = (m / correction1) / (tl.sqrt(v / correction2) + epsilon) + decay * p
        p -= lr * update
        tl.store(first_moment + at, m, mask=mask)
        tl.store(second_moment + at, v, mask=mask)
        tl.store(master + at, p, mask=mask)
        tl.store(weight + at, p.to(HALF), mask=mask & has_weight)
