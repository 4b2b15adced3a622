"""A whole run whose engine shares the trainer's device: the trained state is saved and exported, not what is lent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint
from tests.trainer.test_end_to_end import CONFIG, ROOT, rows

pytestmark = pytest.mark.full

STEPS = 3
OVERRIDES = (
    *("parallel.tensor=1", "parallel.expert=1", "parallel.sequence_parallel=false"),
    *("tracking.wandb=false", "evaluation.every=0", "evaluation.sets=[]", "trainer.checkpoint_every=2"),
    # There are 8 questions: the second and the third step are in two epochs each, and ask some of them twice.
    *("trainer.prompts_per_step=6", "trainer.prompts_per_mini_batch=3"),
)


def run(folder: Path, model: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    config = folder.with_suffix(".yaml")
    config.write_text(CONFIG.format(run=folder, model=model, steps=STEPS, data=model / "sums.jsonl"))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *("--no-python", str(Path(sys.executable).with_name("megatron-dppo")), "train", str(config)),
        *(*OVERRIDES, *overrides),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.timeout(1200)
def test_states_and_models_are_those_of_a_run_on_gpus_of_its_own(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tokenizer = byte_tokenizer()
    write_checkpoint(model, random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    sums = [f'{{"problem": "{i}+{i // 3}", "answer": {i + i // 3}}}\n' for i in range(24)]
    (model / "sums.jsonl").write_text("".join(sums))
    fleet, shared = tmp_path / "fleet", tmp_path / "shared"
    run(fleet, model)
    colocated = ("rollout.placement=colocated", "rollout.enable_sleep=true")
    shared.mkdir()
    (shared / "stop").touch()  # asks for an end after the first step, which is saved though no state is due
    run(shared, model, *colocated)
    assert (shared / "stopped").read_text() == "step 1\n"
    run(shared, model, *colocated, "trainer.resume=true")
    assert [row["step"] for row in rows(shared)] == [1, 2, 3]
    assert sorted(p.name for p in (shared / "checkpoints").glob("step_*")) == ["step_00000002", "step_00000003"]
    awake = tmp_path / "awake"
    run(awake, model, "rollout.placement=colocated")
    parts = [f"sync/lend_{part}_s" for part in ("room", "weights", "copy", "free", "cache")]
    assert all(0 < sum(row[part] for part in parts) <= row["sync/lend_s"] for row in rows(shared))
    assert not any("sync/lend_s" in row for row in rows(awake)), "nothing changes hands"
    ahead = tmp_path / "ahead"
    run(ahead, model, "rollout.placement=colocated", "rollout.schedule=one_step_off")
    assert [row["rollout/staleness_max"] for row in rows(ahead)] == [0, 1, 1]
    assert any(row["rollout/overlap_s"] > 0 for row in rows(ahead)), "the engine samples while the trainer trains"
    assert not any("sync/lend_s" in row for row in rows(ahead))
    before, expected, *found = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (model, fleet / "hf", shared / "hf", awake / "hf")
    )
    assert max((before[name] - tensor).abs().max() for name, tensor in expected.items()) > 1e-3
    for one in found:
        for name, tensor in expected.items():
            torch.testing.assert_close(one[name], tensor, atol=1e-4, rtol=0, msg=name)
