"""FP8 of the engine, as far as a CPU can show it (on GPUs: tests/gpu/test_fp8_rollouts.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.start import open_engine
from tests.rollout.conftest import CONFIG


@pytest.mark.parametrize(("name", "plain"), [("quantization", "none"), ("kv_cache_dtype", "auto")])
def test_a_cpu_refuses_it_by_name(tmp_path: Path, name: str, plain: str) -> None:
    config = CONFIG.model_copy(update={name: "fp8"})
    message = f"rollout.{name}=fp8 needs engines on GPUs, and here is none; set it to {plain}"
    with pytest.raises(UserError, match=message):
        open_engine(tmp_path, config)


def scales(value: float) -> Any:
    """What vLLM's experts keep of their scales, in blocks of 128 x 128."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    w1, w2 = torch.full((4, 2, 3), value), torch.full((4, 3, 1), 2 * value)
    return fp8_w8a8_moe_quant_config(w1_scale=w1, w2_scale=w2, block_shape=[128, 128])


def test_what_a_new_kernel_computed_is_in_the_memory_of_the_first() -> None:
    from megatron_dppo.rollout.vllm.layers import refresh

    first, second = scales(1.0), scales(3.0)
    recorded = first.w1_scale.data_ptr(), first.w2_scale.data_ptr()
    refresh(first, second)
    assert (first.w1_scale == 3.0).all()
    assert (first.w2_scale == 6.0).all()
    assert (first.w1_scale.data_ptr(), first.w2_scale.data_ptr()) == recorded
    second._w1.scale = torch.ones(4, 2, 2)
    with pytest.raises(RuntimeError, match=r"_w1.scale was torch.float32 \[4, 2, 3\] and is torch.float32 \[4, 2, 2\]"):
        refresh(first, second)
