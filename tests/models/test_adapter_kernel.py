"""The kernel that adds adapters' shares to experts' products, as Triton's interpreter runs it on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
COUNTS = [0, 33, 130, 0, 1, 40]


def check(rank: int, parts: int, width: int) -> None:
    """`low B^T` into the forward's output and `low A` into the backward's, next to a loop in float64."""
    from megatron_dppo.models.lora.adapter_kernels import add_low_rank
    from megatron_dppo.models.lora.grouped import launch

    torch.manual_seed(0)
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    low = torch.randn(int(ends[-1]), parts * rank)
    a, b = torch.randn(len(COUNTS), parts * rank, width), torch.randn(len(COUNTS), parts, width, rank)
    lows = low.double().split(COUNTS)
    dx, y = torch.randn(len(low), width), torch.randn(len(low), parts * width)
    want = dx.double() + torch.cat([rows @ one.double() for rows, one in zip(lows, a, strict=True)])
    launch(add_low_rank, dx, low, ends, a, 1, a_side=True)
    torch.testing.assert_close(dx.double(), want, rtol=1e-5, atol=1e-4)
    shares = [
        torch.cat([part @ rows.double().t() for part, rows in zip(of.chunk(parts, 1), one, strict=True)], 1)
        for of, one in zip(lows, b, strict=True)
    ]
    want = y.double() + torch.cat(shares)
    launch(add_low_rank, y, low, ends, b, parts, a_side=False)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)


def test_shares_are_added_where_the_products_lie() -> None:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


if __name__ == "__main__":
    for rank, parts, width in ((8, 2, 160), (24, 1, 72), (32, 2, 96), (16, 3, 129), (136, 2, 96), (264, 2, 40)):
        check(rank, parts, width)
