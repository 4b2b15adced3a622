"""Matrix products that keep float32 between half-precision inputs and what is done with the result."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, the type itself otherwise."""
    return torch.float32 if dtype in HALF else dtype


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the accumulation type. On CUDA the tensor cores' float32 sums come out unrounded."""
    if a.is_cuda and a.dtype in HALF:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(accumulation_dtype(a.dtype)) @ b.to(accumulation_dtype(b.dtype))


def write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out = a @ b``, rounded once to the type of ``out``."""
    if out.dtype == a.dtype == b.dtype and (out.is_cuda or out.dtype not in HALF):
        torch.mm(a, b, out=out)
    else:
        out.copy_(product(a, b))


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out += a @ b``, the sum in the accumulation type."""
    if out.dtype == a.dtype == b.dtype and (out.is_cuda or out.dtype not in HALF):
        torch.addmm(out, a, b, out=out)
    elif out.is_cuda and out.dtype == torch.float32 and a.dtype == b.dtype:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out.add_(product(a, b))
