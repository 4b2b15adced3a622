"""Three steps of training with harnesses that nobody here wrote, each in an environment of its own: three turns, a call
of a tool and an edited history in every episode, and every token of every batch.

The variables name the Python of an environment that has the package: OPENAI_AGENTS_PYTHON (openai-agents 0.24.0),
SMOLAGENTS_PYTHON (smolagents[openai] 1.26.0), VERIFIERS_PYTHON (verifiers 0.3.1).
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from examples.agent.make_model import CALL, CALLED, agent_tokenizer
from examples.tiny_moe_dppo.model import random_tiny_model, write_checkpoint
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import SamplingConfig
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.trainer.agents import AgentPlayer
from megatron_dppo.trainer.requests import Draws
from tests.rollout.reference import check_record
from tests.trainer.test_agents import Policy

ROOT = Path(__file__).resolve().parents[2]
LAYERS, EPISODES = 4, 4
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "51"}}</tool_call>'
HARNESSES = {
    "openai_agents": [f"{CALL}1 + 2{CALLED}", "three", "three again"],
    "smolagents": [f"{CALL}1 + 2{CALLED}", f"{CALL}3 + 4{CALLED}", FINAL],
    "verifiers": [f"{CALL}1 + 2{CALLED}", f"{CALL}3 + 4{CALLED}", "seven"],
}
"""What the policy is taught to say, turn by turn."""
ROLLOUT = {"max_prompt_tokens": 900, "max_response_tokens": 80}


class Scripted(Policy):
    """Says its lines."""

    def __init__(self, tokenizer, lines: list[str]) -> None:
        super().__init__(tokenizer)
        self.lines = lines

    def words(self, request) -> str:
        return self.lines[int(request.request_id.rsplit("/", 1)[1])]


def taught(name: str, task: TaskConfig, folder: Path) -> None:
    """Write a tiny model that has learned its lines from episodes of the same harness."""
    tokenizer = agent_tokenizer()
    questions = build_task(task, tokenizer)
    player = AgentPlayer(task, RolloutConfig(**ROLLOUT), tokenizer, questions.grader)
    try:
        sampling = SamplingConfig(max_tokens=ROLLOUT["max_response_tokens"])
        scripted = Scripted(tokenizer, HARNESSES[name])
        played = player.play(scripted, sampling, questions.prompts(0, 6), 1, Draws(0, 0))
    finally:
        player.close()
        questions.close()
    assert played.turns.tolist() == [3] * 6
    batch = played.batch
    width = int(batch.lengths.max())
    ids = torch.full((len(batch), width), int(tokenizer.pad_token_id))
    own = torch.zeros(len(batch), width, dtype=torch.bool)
    for b in range(len(batch)):
        rows = slice(batch.offsets[b], batch.offsets[b + 1])
        ids[b, : batch.lengths[b]] = torch.from_numpy(batch.token_ids[rows].astype(np.int64))
        own[b, : batch.lengths[b]] = torch.from_numpy(batch.loss_mask[rows])
    model = random_tiny_model(tokenizer, 0, "qwen3_moe")
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[own[:, 1:]], ids[:, 1:][own[:, 1:]])
        adam.zero_grad()
        loss.backward()
        adam.step()
    write_checkpoint(folder, model, tokenizer)


@pytest.mark.full
@pytest.mark.parametrize("name", HARNESSES)
def test_three_steps_token_by_token(name: str, tmp_path: Path) -> None:
    python = os.environ.get(f"{name.upper()}_PYTHON")
    if python is None:
        pytest.skip(f"{name.upper()}_PYTHON names no environment that has {name}")
    program = f"{python} {ROOT / f'tests/agents/foreign/{name}_program.py'}"
    task = {
        "kind": "agent", "agent": {"command": program, "timeout_s": 200, "max_turns": 3},
        "prompt": "{metadata[expression]}", "parameters": {"min_terms": 2, "max_terms": 2},
        "train_size": 8, "held_out_size": 1,
    }  # fmt: skip
    taught(name, TaskConfig(**task), tmp_path / "model")
    config = {
        "run": {"dir": str(tmp_path / "run"), "seed": 1},
        "model": {"path": str(tmp_path / "model")},
        "actor": {"dtype": "float32", "max_tokens_per_microbatch": 4000},
        "optimizer": {"lr": 1e-4},
        "rollout": ROLLOUT
        | {"dtype": "float32", "kv_cache_mib": 64, "max_num_seqs": 8, "top_k_logprobs": 5, "enforce_eager": True},
        "task": task,
        "trainer": {"steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2, "prompts_per_mini_batch": 1}
        | {"export_hugging_face": False},
        "evaluation": {"every": 0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "batches").mkdir()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *(str(ROOT / "tests/trainer/sudoku_ranks.py"), str(tmp_path / "run.yaml"), str(tmp_path / "batches")),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    tokenizer = agent_tokenizer()
    batches = [pickle.loads((tmp_path / f"batches/{step}.pickle").read_bytes()) for step in range(3)]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "optimizer/loss" in row]
    for batch, row in zip(batches, rows, strict=True):
        said = []
        for b in range(len(batch)):
            ids = batch.token_ids[batch.offsets[b] : batch.offsets[b + 1]]
            mask = batch.loss_mask[batch.offsets[b] : batch.offsets[b + 1]]
            for stretch in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1):
                if mask[stretch[0]]:
                    said.append(tokenizer.decode(ids[stretch]))
                    assert said[-1].endswith("<|end|>") or stretch[-1] == len(ids) - 1
        # What is trained on is what the policy said and nothing else, and it says about what it was taught.
        assert not any(mark in one for one in said for mark in ("<|user|>", "<|tool|>", "<|system|>", "<|assistant|>"))
        assert sum(CALL in one for one in said) >= EPISODES - 1
        assert row["episode/turns_mean"] > 2
        assert row["agent/branches"] >= 1
        assert row["reward/errors/agent"] <= 1
        assert row["policy/tokens"] == batch.loss_mask.sum()
        assert (batch.mu_logp[~batch.loss_mask] == 0).all()
        assert row["r3/replayed_routings"] == LAYERS * (len(batch.token_ids) - len(batch))
    assert rows[0]["parity/max_abs_logp_gap"] < 1e-3
    check_record(tmp_path / "model", batches[0], LAYERS)
    turns = [row["episode/turns_mean"] for row in rows]
    print(f"\n{name}: {sum(map(len, batches))} sequences, {sum(len(b.token_ids) for b in batches)} tokens, of which "
          f"{sum(int(b.loss_mask.sum()) for b in batches)} trained; turns {turns}")  # fmt: skip
