"""FP8 of the engine, and what the planner says of it, as far as a CPU can show it (on GPUs:
tests/gpu/test_fp8_rollouts.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import resolve_hf_config
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.planner.engine import EngineSettings, plan_engine
from megatron_dppo.planner.gpus import GPUS
from megatron_dppo.planner.sync import sync_memory
from megatron_dppo.planner.workload import Layout, Workload
from megatron_dppo.rollout.start import open_engine
from tests.models.public_configs import CONFIGS
from tests.rollout.conftest import CONFIG

H100 = GPUS["h100-80g"]


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


def quantised_by_vllm(experts: int, hidden: int, width: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes of a GPU's experts as vLLM's own functions make them of bfloat16: quantised, and while that is done. No
    kernel of a CPU computes with them: who would set one up is asked what it is given."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.quantization.online import fp8

    def blocks(matrix: torch.Tensor, block_size: list[int], use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = (side // block for side, block in zip(matrix.shape, block_size, strict=True))
        return matrix.to(torch.float8_e4m3fn), torch.ones(rows, columns)

    made: list[torch.Tensor] = []
    monkeypatch.setattr(fp8, "per_block_cast_to_fp8", blocks)
    method: Any = object.__new__(fp8.Fp8PerBlockOnlineMoEMethod)
    method.weight_block_size = [128, 128]
    method._setup_kernel = lambda layer, *tensors: made.extend(tensor for tensor in tensors if tensor is not None)
    high, wide = method.maybe_roundup_sizes(hidden, width, torch.bfloat16, FusedMoEParallelConfig.make_no_parallel())
    layer = SimpleNamespace(
        local_num_experts=experts,
        w13_weight=torch.ones(experts, 2 * wide, high, dtype=torch.bfloat16),
        w2_weight=torch.ones(experts, high, wide, dtype=torch.bfloat16),
        w13_input_scale=None,
        w2_input_scale=None,
        moe_config=SimpleNamespace(hidden_dim_unpadded=hidden, intermediate_size_per_partition_unpadded=width),
    )
    method.process_weights_after_loading(layer)
    kept = sum(tensor.nbytes for tensor in made)
    return kept, layer.w13_weight.nbytes + layer.w2_weight.nbytes + sum(t.nbytes for t in made if t.element_size() == 1)


@pytest.mark.parametrize(("width", "hidden", "own"), [(768, 2048, False), (768, 2048, True), (704, 320, False)])
def test_experts_that_vllm_quantises(width: int, hidden: int, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of eight: slices of 96 or 88 rows, which it fills up to 128 (and 320 columns up to 384), or experts of
    its own. In a sync their part is there as it was, as it came (whole), and as it becomes."""
    workload = Workload(sequences=8, mini_batches=1, prompt_tokens=64, response_tokens=64, mean_response_tokens=64)
    settings = EngineSettings(quantized=True, tensor=8, expert_parallel=own)
    sides = {"num_hidden_layers": 1, "moe_intermediate_size": width, "hidden_size": hidden}
    few, more = (resolve_hf_config(CONFIGS["Qwen3-30B-A3B"] | sides | {"num_experts": n}) for n in (128, 256))
    planned = [plan_engine(model, H100, 8, workload, settings).weights for model in (few, more)]
    routers = 2 * 128 * hidden // 8
    kept, making = quantised_by_vllm(16 if own else 128, hidden, width if own else width // 8, monkeypatch)
    assert planned[1] - planned[0] == pytest.approx(kept + routers, abs=2)
    plain = dataclasses.replace(settings, quantized=False)
    layout = Layout(few, H100, 8, ParallelConfig())
    syncing, unquantised = (sync_memory(layout, one, 8, colocated=True).usual for one in (settings, plain))
    whole = 2 * 128 * 3 * width * hidden // (8 if own else 1)
    assert syncing - unquantised == pytest.approx(whole + making, abs=8)
