"""Three steps of episodes that a harness plays and edits, with the real vLLM and Megatron-Core: every token of every
batch, and what each is trained with."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.batch import RolloutBatch
from tests.rollout.reference import check_record
from tests.tiny import tiny_qwen3_moe

EPISODES, LAYERS, RESPONSE = 4, 2, 6
CONFIG = """
run: {{dir: {run}, name: agent, seed: 3}}
model: {{path: {model}}}
actor: {{dtype: float32, max_tokens_per_microbatch: 3000}}
optimizer: {{lr: 1.0e-3}}
rollout: {{max_prompt_tokens: 300, max_response_tokens: 6, dtype: float32, kv_cache_mib: 64, max_num_seqs: 8,
  top_k_logprobs: 5, schedule: {schedule}, partial_rollouts: {partial}}}
task:
  kind: agent
  agent: {{function: "tests.trainer.agent_harnesses:edited", credit: {credit}, discount: 1.0, timeout_s: 120}}
  parameters: {{min_terms: 2, max_terms: 2}}
  prompt: "{{metadata[expression]}}"
  train_size: 8
  held_out_size: 1
trainer: {{steps: 3, prompts_per_step: 2, samples_per_prompt: 2, prompts_per_mini_batch: 1,
  export_hugging_face: false}}
evaluation: {{every: 3, prompts: 1, samples: 2}}
tracking: {{samples_every: 1, samples: 2}}
"""


def train(
    folder: Path,
    *,
    credit: str = "episode",
    schedule: str = "synchronous",
    partial: bool = False,
    engines: int = 1,
    ranks: str = "sudoku_ranks.py",
):
    (folder / "batches").mkdir(parents=True)
    tiny_qwen3_moe(folder / "model", seed=4, max_position_embeddings=512, num_hidden_layers=LAYERS)
    config = folder / "agent.yaml"
    named = {"credit": credit, "schedule": schedule, "partial": str(partial).lower()}
    made = CONFIG.format(run=folder / "run", model=folder / "model", **named)
    config.write_text(made.replace("rollout: {", f"rollout: {{engines: {engines}, "))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *(str(Path(__file__).with_name(ranks)), str(config), str(folder / "batches")),
    ]
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, cwd=root, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    batches = [pickle.loads((folder / f"batches/{step}.pickle").read_bytes()) for step in range(3)]
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return folder / "model", batches, rows


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[RolloutBatch], list[dict[str, float]]]:
    return train(tmp_path_factory.mktemp("agent"))


@pytest.mark.slow
def test_every_turn_is_trained_on_once_in_a_sequence_of_its_own_history(run):
    _, batches, rows = run
    trained = [row for row in rows if "optimizer/loss" in row]
    for batch, row in zip(batches, trained, strict=True):
        assert len(batch) == 2 * EPISODES
        assert row["episode/turns_mean"] == 3
        assert row["agent/branches"] == EPISODES
        assert row["reward/mean"] == row["reward/accuracy"] == 0.5
        assert row["policy/tokens"] == batch.loss_mask.sum()
        assert row["response/length_mean"] == batch.loss_mask.sum() / EPISODES
        assert (batch.sampled_per_sequence[::2] > batch.sampled_per_sequence[1::2].clip(max=1)).all()
        assert (batch.sampled_per_sequence[1::2] <= RESPONSE).all()
        assert (batch.mu_logp[~batch.loss_mask] == 0).all()
        assert (batch.topk_ids[batch.loss_mask] >= 0).all()
        assert 0 < row["agent/engine_busy_fraction"] <= 1
        assert row["optimizer/grad_norm"] > 0
    assert any("eval/accuracy" in row and row["eval/accuracy"] == 0.5 for row in rows)


@pytest.mark.slow
def test_log_mu_and_routes_are_those_of_transformers_on_the_trained_sequences(run):
    model, batches, _ = run
    batch = batches[0]
    assert batch.routes.valid.sum() == len(batch.token_ids) - len(batch)
    check_record(model, batch, LAYERS)


@pytest.mark.slow
def test_the_trainer_replayed_every_route(run):
    _, batches, rows = run
    trained = [row for row in rows if "optimizer/loss" in row]
    assert trained[0]["parity/max_abs_logp_gap"] < 1e-3
    for batch, row in zip(batches, trained, strict=True):
        assert row["r3/replayed_routings"] == LAYERS * (len(batch.token_ids) - len(batch))


@pytest.mark.slow
def test_samples_hold_every_sequence_of_an_episode_and_say_what_was_not_trained_on(run):
    model, batches, _ = run
    rows = [json.loads(line) for line in (model.parent / "run/samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["episode"], row["sequence"]) for row in rows[:4]] == [
        *((1, 0, 0), (1, 0, 1), (1, 2, 4), (1, 2, 5))
    ]
    for row in rows[:4]:
        b = row["sequence"]
        mask = batches[0].loss_mask[batches[0].offsets[b] : batches[0].offsets[b + 1]][row["prompt_tokens"] :]
        assert row["untrained"] == np.flatnonzero(~mask).tolist()


@pytest.mark.full
@pytest.mark.parametrize("partial", [False, True])
def test_sampled_ahead_with_credit_by_turn(tmp_path, partial):
    """With partial rollouts a weight sync cuts the turns under way, which go on under the new weights."""
    _, batches, rows = train(tmp_path / "ahead", credit="turn", schedule="one_step_off", partial=partial)
    trained = [row for row in rows if "optimizer/loss" in row]
    staleness = [row["rollout/staleness_max"] for row in trained]
    assert staleness[0] == 0
    assert max(staleness) <= 1  # 0 where the episodes took longer to begin than the step before them to train
    assert all(row["optimizer/skipped_steps"] == 0 for row in trained)
    assert [row["policy/tokens"] for row in trained] == [batch.loss_mask.sum() for batch in batches]


@pytest.mark.full
def test_an_engine_that_is_killed_inside_a_turn_loses_and_doubles_nothing(tmp_path):
    _, batches, rows = train(tmp_path / "killed", engines=2, ranks="agent_ranks.py")
    trained = [row for row in rows if "optimizer/loss" in row]
    assert sum(row["rollout/engine_failures"] for row in trained) == 1
    assert sum(row["rollout/requeued_sequences"] for row in trained) >= 1
    for batch, row in zip(batches, trained, strict=True):
        assert row["reward/errors/agent"] == 0
        assert row["episode/turns_mean"] == 3
        assert len(set(batch.request_ids)) == len(batch) == 2 * EPISODES
        assert row["policy/tokens"] == batch.loss_mask.sum()
    log = [json.loads(line) for line in (tmp_path / "killed/run/logs/rank-00000.jsonl").read_text().splitlines()]
    assert sum("another one takes its place" in line["message"] for line in log) == 1
