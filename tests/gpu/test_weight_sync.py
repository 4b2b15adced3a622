"""On GPUs: the weights that the ranks send are the weights that the engine samples from, over CUDA IPC and NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_fp8_rollouts import NEEDS_CUDA, check_three_syncs

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "rollout.enforce_eager=true",
    "rollout.gpu_memory_utilization=0.2",
    "rollout.kv_cache_mib=4096",
    "rollout.max_prompt_tokens=256",
    "rollout.max_response_tokens=32",
    "rollout.max_num_seqs=64",
    "rollout.max_num_batched_tokens=2048",
    "trainer.steps=2",
    "trainer.prompts_per_step=8",
    "trainer.samples_per_prompt=4",
    "trainer.prompts_per_mini_batch=4",
    "actor.recompute=none",
)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "placement", "ranks", "engine"),
    [
        (1, "colocated", 1, ()),
        (1, "colocated", 1, ("rollout.enable_sleep=false",)),
        (1, "colocated", 1, ("rollout.enable_sleep=false", "rollout.schedule=one_step_off")),
        (2, "colocated", 2, ()),
        (2, "fleet", 1, ()),
        (2, "colocated", 2, ("rollout.tensor_parallel=2", "rollout.expert_parallel=true")),
    ],
    ids=["colocated on one", "awake on one", "ahead on one", "colocated", "fleet", "colocated, experts divided"],
)
def test_random_weights_arrive(tmp_path: Path, gpus: int, placement: str, ranks: int, engine: tuple[str, ...]) -> None:
    """The engine starts from other random weights: its first rollout agrees with the trainer only after a sync."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices, TransformerEngine and vLLM")
    environment = os.environ | {
        "PYTHON": sys.executable,
        "NPROC": str(ranks),
        "MODEL_DIR": str(tmp_path / "shapes"),
        "RUN_DIR": str(tmp_path / "run"),
    }
    script = ["bash", str(ROOT / "examples/run_qwen3_moe_dppo.sh"), "--random-weights", "--layers", "1"]
    done = subprocess.run(
        [*script, *SMALL, f"rollout.placement={placement}", *engine],
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["parity/max_abs_logp_gap"] < 0.1  # two sets of weights would be several nats apart
    steps = [row for row in rows if "sync/bytes" in row]
    assert len(steps) == 2
    assert steps[0]["sync/bytes"] == steps[1]["sync/bytes"] > 2e9
    assert steps[1]["sync/worker_by_views"] == 1, "vLLM's loaders had something to do"
    assert (steps[0]["sync/worker_bytes"] < steps[0]["sync/bytes"]) == ("rollout.expert_parallel=true" in engine)
    first, second = (step["memory/rank_allocated_gib"] for step in steps)
    assert second - first < 0.1, "a sync leaves its buffers behind"
    first, second = (step["sync/worker_gpu_used_gib"] for step in steps)
    assert placement == "colocated" or abs(second - first) < 0.1, "an engine keeps what a sync needed"


LATENT = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "q_lora_rank": 128} | {
    "kv_lora_rank": 512,  # the rest is what kernels of latent attention take: the published sizes of heads
    "qk_rope_head_dim": 64,
}
MOONLIGHT = LATENT | {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": None,
}
FLASH = LATENT | {
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize(
    ("family", "shape", "options"),
    [
        ("deepseek_v3", MOONLIGHT, {}),
        ("glm4_moe_lite", FLASH, {}),
        ("deepseek_v3", MOONLIGHT, {"quantization": "fp8"}),
    ],
    ids=["Moonlight", "GLM-4.7-Flash", "Moonlight in FP8"],
)
def test_latent_attention_decodes_by_what_came(
    tmp_path: Path, family: str, shape: dict[str, Any], options: dict[str, str]
) -> None:
    """vLLM decodes, in CUDA graphs, by two matrices made of `kv_b_proj`: made anew, in their place, at each sync, or
    all tokens but the first would be those of old weights."""
    check_three_syncs(tmp_path, family, shape, options)


@pytest.mark.gpu
@NEEDS_CUDA
def test_learning_views_takes_little_memory() -> None:
    """A byte for a number of one layer: 8 for a number were 56 GiB for DeepSeek-V3's experts."""
    from megatron_dppo.rollout.vllm.views import covered_once

    stack = torch.ones(256, 1024, 2048, dtype=torch.bfloat16, device="cuda")
    halves = [(start * stack[0].numel() // 2, (256, 512, 2048), stack.stride()) for start in range(2)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert covered_once(stack, halves)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * stack.numel()
