"""The reference engine needs no vLLM: with one that cannot be imported everything but vLLM's own engine works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tiny import tiny_qwen3_moe

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys
from pathlib import Path
import numpy as np
import megatron_dppo.doctor.parity, megatron_dppo.trainer.evaluate_model, megatron_dppo.trainer.train
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.rollout.start import open_engine

def opened(name):
    config = RolloutConfig(engine=name, max_prompt_tokens=8, max_response_tokens=4, dtype="float32")
    return open_engine(Path(sys.argv[1]), config)

asked = [GenerationRequest(request_id="0/0/0", prompt_ids=np.array([5, 6], dtype=np.int32), seed=1)]
engine = opened("reference")
batch = engine.generate(asked, SamplingConfig(max_tokens=4, top_k_logprobs=2), training=True)
engine.close()
print(batch.routes.valid.sum() == len(batch.token_ids) - 1, "vllm" in sys.modules)
try:
    opened("vllm")
except ImportError as error:
    print(error)
"""


def test_everything_else_starts(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path / "model", seed=1)
    (tmp_path / "blocked/vllm").mkdir(parents=True)
    (tmp_path / "blocked/vllm/__init__.py").write_text("raise ImportError('vLLM is blocked')\n")
    paths = os.pathsep.join([str(tmp_path / "blocked"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.stdout.splitlines() == ["True False", "vLLM is blocked"], done.stderr
