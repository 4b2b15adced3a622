"""What users bring from a package of their own touches no file of the product: a divergence, a loss, advantages, a
reward and an engine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint
from megatron_dppo.algorithm import divergence_for, policy_loss
from megatron_dppo.config.load import load_config
from megatron_dppo.preflight.rules import check_sections
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.rollout.start import open_engine
from megatron_dppo.tasks.rewards.grader import build_grader
from megatron_dppo.tasks.task import Prompt

ROOT = Path(__file__).resolve().parents[2]
TOYS = {
    "divergence.py": """
        from megatron_dppo.algorithm import Divergence
        def squared(x): return (x.anchor_logp.exp() - x.logp.exp()) ** 2
        SQUARED = Divergence(squared, thresholds={"own": 0.04})
    """,
    "loss.py": """
        def plain(x): return -x.advantages * x.logp
    """,
    "advantage.py": """
        def halved(rewards, groups): return (rewards - 0.5) / (1 + groups)
    """,
    "reward.py": """
        def even(*, response, **_): return float(len(response) % 2 == 0)
    """,
}


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """A configuration that names the toys, which stand in a package beside it."""
    package = tmp_path / "toys"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text((ROOT / "tests/rollout/uniform_engine.py").read_text())
    for name, code in TOYS.items():
        (package / name).write_text("\n".join(line.removeprefix(" " * 8) for line in code.splitlines()))
    tokenizer = byte_tokenizer()
    write_checkpoint(tmp_path / "model", random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.split(".")[0] == "toys"]:
        monkeypatch.delitem(sys.modules, name)
    tree = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(tmp_path / "model")},
        "actor": {"dtype": "float32", "max_tokens_per_microbatch": 512},
        "optimizer": {"lr": 1e-3},
        "algorithm": {
            "divergence": "toys.divergence:SQUARED",
            "loss": "toys.loss:plain",
            "advantage": "toys.advantage:halved",
        },
        "rollout": {
            **{"max_prompt_tokens": 64, "max_response_tokens": 8, "top_k_logprobs": 0, "dtype": "float32"},
            **{"kv_cache_mib": 64, "max_num_seqs": 64, "cpu_threads": 1, "enforce_eager": True},
        },
        "task": {
            **{"dataset": "chain_sum", "prompt": "{metadata[expression]}", "train_size": 64, "held_out_size": 8},
            "rewards": [{"kind": "python", "path": "toys.reward:even", "sandbox": "none"}],
        },
        "trainer": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "prompts_per_mini_batch": 2},
        "evaluation": {"every": 0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "run.yaml"


def product() -> dict[str, str]:
    """Every file of the product and what is in it."""
    files = (file for file in (ROOT / "megatron_dppo").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_a_file_each_and_none_of_the_product(config):
    before = product()
    run = load_config(config, ["rollout.engine=toys.engine:make"])
    assert list(check_sections(run)) == []
    preset = run.algorithm.resolve()
    mu = torch.tensor([0.5, 0.5]).log()
    logp = torch.tensor([0.8, 0.6]).log().requires_grad_()
    divergence = divergence_for(preset, logp=logp, mu_logp=mu)
    loss = policy_loss(preset, logp, mu, torch.ones(2), loss_mask=torch.ones(2).bool(), divergence=divergence)
    assert loss.mask.tolist() == [False, True]
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), logp)
    assert gradient.tolist() == [0.0, -1.0]
    assert run.algorithm.advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 1])).tolist() == [0.5, -0.25]
    one = run.task.model_copy(update={"reward_workers": 1, "reward_memory_mib": 8192})
    made = build_grader(one, max_response_tokens=8)
    prompt = Prompt(index=0, prompt_ids=np.zeros(1, np.int32), text="", question="", answer="", metadata={})
    try:
        assert made.score([prompt] * 2, ["ab", "abc"], lengths=[2, 3]).reward.tolist() == [1.0, 0.0]
    finally:
        made.close()
    engine = open_engine(run.model.path, run.rollout)
    asked = [GenerationRequest(request_id="0/0/0", prompt_ids=np.arange(3, dtype=np.int32), seed=3)]
    answer = engine.generate(asked, SamplingConfig(max_tokens=8), training=True)
    assert type(engine).__module__ == "toys.engine"
    assert (len(answer.token_ids), answer.request_ids) == (11, ("0/0/0",))
    assert product() == before
    assert not [file for file in before if file.endswith(".py") and "toys." in Path(file).read_text()]


@pytest.mark.full
def test_a_whole_run(config):
    """On one rank with an engine: what is logged is the toys'. A changed path is not resumed from."""

    def train(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
            *("--no-python", str(Path(sys.executable).with_name("megatron-dppo"))),
            "train",
            str(config),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [*command, *overrides], capture_output=True, text=True, env=environment, timeout=500, check=False
        )

    before = product()
    done = train("trainer.checkpoint_every=1")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = [json.loads(line) for line in (config.parent / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["reward/mean"] == row["reward/part/python"]
        assert row["optimizer/skipped_steps"] == 0
        assert row["policy/divergence_max"] <= row["policy/abs_prob_diff_max"] ** 2 * (1 + 1e-6)
    assert product() == before
    other = train("trainer.checkpoint_every=1", "trainer.steps=3", "trainer.resume=true", "algorithm.loss=null")
    assert other.returncode != 0
    assert "algorithm.loss was 'toys.loss:plain' and is None now" in other.stderr
