"""A run that is ended by SIGTERM at random moments goes on where it was, and ends with the same losses.

`SIGTERM_TIMES` (default 2) is how many runs are made; each is ended once at a random moment between its start and its end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dppo.models.tiny_qwen3_moe import random_tiny_qwen3_moe, write_checkpoint
from megatron_dppo.models.tiny_tokenizer import byte_tokenizer

TIMES = int(os.environ.get("SIGTERM_TIMES", "2"))
CANARY = "canary-5ecre7-value"
CONFIG = """
run: {{dir: {run}, name: sigterm, seed: 3}}
model: {{path: {model}}}
parallel: {{tensor: 2, expert: 2, sequence_parallel: true}}
actor: {{dtype: float32, max_tokens_per_microbatch: 512}}
optimizer: {{lr: 1.0e-3}}
rollout: {{max_prompt_tokens: 32, max_response_tokens: 8, dtype: float32, kv_cache_mib: 64, max_num_seqs: 64}}
task:
  parameters: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
  prompt: "{{metadata[expression]}}"
  train_size: 64
  held_out_size: 16
trainer: {{steps: 8, prompts_per_step: 8, samples_per_prompt: 4, prompts_per_mini_batch: 4, export_hugging_face: false}}
evaluation: {{every: 0}}
"""


def start(folder: Path, model: Path) -> subprocess.Popen[str]:
    config = folder.with_suffix(".yaml")
    config.write_text(CONFIG.format(run=folder, model=model))
    resume = any(folder.glob("checkpoints/step_*/state.json"))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"),
        *(
            str(Path(sys.executable).with_name("megatron-dppo")),
            "train",
            str(config),
            f"trainer.resume={resume}".lower(),
        ),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_TOKEN": CANARY, "WANDB_API_KEY": CANARY}
    with open(folder.with_suffix(".log"), "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        row["step"]: (row["optimizer/loss"], row["optimizer/grad_norm"]) for row in lines if "optimizer/loss" in row
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    write_checkpoint(folder, random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[dict[int, tuple[float, float]], float]:
    """Losses of the run that nobody ends, and its seconds."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    begin = time.monotonic()
    process = start(folder, model)
    assert process.wait(timeout=500) == 0, folder.with_suffix(".log").read_text()[-3000:]
    return losses(folder), time.monotonic() - begin


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(TIMES))
def test_ended_at_a_random_moment(number: int, whole, model: Path, tmp_path: Path) -> None:
    expected, seconds = whole
    assert list(expected) == list(range(1, 9))
    folder = tmp_path / "ended"
    moment = random.Random(number).uniform(0.0, seconds)
    process = start(folder, model)
    time.sleep(moment)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=120)
    state = (folder / "stopped").read_text().strip() if (folder / "stopped").exists() else "not stopped in a step"
    print(f"SIGTERM after {moment:.1f} of {seconds:.1f} s: {state}")
    if not any(folder.glob("checkpoints/step_*/state.json")) and (folder / "metrics.jsonl").exists():
        folder.rename(folder.with_name("lost"))  # as docker/start_node.sh does: ended before anything was saved
    process = start(folder, model)
    assert process.wait(timeout=500) == 0, folder.with_suffix(".log").read_text()[-3000:]
    assert losses(folder) == expected
    for file in (file for file in folder.rglob("*") if file.is_file()):
        assert CANARY.encode() not in file.read_bytes(), file
    assert CANARY not in folder.with_suffix(".log").read_text()
