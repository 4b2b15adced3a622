"""FP8 rollouts on a GPU, CUDA graphs on: what is recorded after each of three syncs is of the weights that came."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json
import sys
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig, update_weights
from megatron_dppo.rollout.start import open_engine, transformers_opinion


def gap(folder, config, batch):
    rows = batch.loss_mask
    return float(np.abs(batch.mu_logp - transformers_opinion(folder, config, batch).mu_logp)[rows].mean())


if __name__ == "__main__":
    folders = [Path(folder) for folder in sys.argv[2:]]
    options = {"dtype": "bfloat16", "max_prompt_tokens": 64, "max_response_tokens": 32, "max_num_seqs": 32}
    config = RolloutConfig(**options, **json.loads(sys.argv[1]), gpu_memory_utilization=0.1, kv_cache_mib=512)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 300, 20).astype(np.int32) for _ in range(32)]
    engine = open_engine(folders[0], config)
    batches = []
    try:
        for version, folder in enumerate(folders):
            if version:
                update_weights(engine, version, load_file(folder / "model.safetensors").items(), bucket_mib=1)
            asked = [
                GenerationRequest(request_id=f"{version}/{i}", prompt_ids=ids, seed=i) for i, ids in enumerate(prompts)
            ]
            sampling = SamplingConfig(max_tokens=32, top_k_logprobs=20)
            batches.append(engine.generate(asked, sampling, training=True))
            assert (batches[-1].weight_versions == version).all()
            assert batches[-1].routes.valid.sum() == len(batches[-1].token_ids) - len(prompts)
        try:
            some = list(load_file(folders[0] / "model.safetensors").items())[:-3]
            engine._manifest.end = lambda: None
            update_weights(engine, len(folders), some, bucket_mib=1)
            refused = ""
        except Exception as error:
            refused = str(error)
    finally:
        engine.close()
    own = [gap(folder, config, batch) for folder, batch in zip(folders, batches)]
    other = [gap(folders[i - 1], config, batch) for i, batch in enumerate(batches)]
    print("RESULT", json.dumps({"own": own, "other": other, "refused": refused}))
"""


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and vLLM")


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}])
def test_three_syncs(tmp_path: Path, options: dict[str, str]) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    check_three_syncs(tmp_path, "qwen3_moe", shape, options)


def check_three_syncs(tmp_path: Path, family: str, shape: dict[str, Any], options: dict[str, str]) -> None:
    """Near transformers in float32 by the weights of the sync, far by the others; the same without FP8, nearer."""
    from tests.tiny import tiny_model

    folders = [tmp_path / str(seed) for seed in range(4)]
    for seed, folder in enumerate(folders):
        tiny_model(family, folder, seed=seed, dtype=torch.bfloat16, **shape)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    command = [sys.executable, str(program), json.dumps(options), *map(str, folders)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=os.environ | {"PYTHONPATH": path}, check=False
    )
    assert "RESULT" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(done.stdout.rpartition("RESULT")[2])
    print(options, result)
    own, other = np.array(result["own"]), np.array(result["other"])
    assert (own < 0.2 * other).all(), result
    assert own[1:].max() < 2 * own[0] + 0.02, result  # a sync leaves it as near as the load did
    assert "layers without all of their weights" in result["refused"]
