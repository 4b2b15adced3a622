"""Three steps of multi-turn Sudoku with the real GEM, vLLM and Megatron-Core: every token of every batch."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from megatron_dppo.batch import RolloutBatch
from tests.rollout.reference import check_record
from tests.tasks.environments.lucky import LuckySudoku
from tests.tiny import tiny_qwen3_moe

TURNS, RESPONSE, EPISODES, LAYERS = 3, 6, 4, 2
CONFIG = f"""
run: {{{{dir: {{run}}, name: sudoku, seed: 3}}}}
model: {{{{path: {{model}}}}}}
actor: {{{{dtype: float32, max_tokens_per_microbatch: 6000}}}}
optimizer: {{{{lr: 1.0e-3}}}}
rollout: {{{{max_prompt_tokens: 2900, max_response_tokens: {RESPONSE}, dtype: float32, kv_cache_mib: 128,
  max_num_seqs: 8, top_k_logprobs: 5}}}}
task:
  kind: environment
  environment: {{{{name: lucky, factory: "tests.tasks.environments.lucky:LuckySudoku", max_turns: {TURNS}}}}}
  train_size: 8
  held_out_size: 1
trainer: {{{{steps: 3, prompts_per_step: 2, samples_per_prompt: 2, prompts_per_mini_batch: 1,
  export_hugging_face: false}}}}
evaluation: {{{{every: 3, prompts: 1, samples: 2}}}}
tracking: {{{{samples_every: 1, samples: 4}}}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[RolloutBatch], list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("sudoku")
    (folder / "batches").mkdir()
    tiny_qwen3_moe(folder / "model", seed=4, max_position_embeddings=4096, num_hidden_layers=LAYERS)
    config = folder / "sudoku.yaml"
    config.write_text(CONFIG.format(run=folder / "run", model=folder / "model"))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *(str(Path(__file__).with_name("sudoku_ranks.py")), str(config), str(folder / "batches")),
    ]
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    batches = [pickle.loads((folder / f"batches/{step}.pickle").read_bytes()) for step in range(3)]
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    kept = [json.loads(line) for line in (folder / "run/samples.jsonl").read_text().splitlines()]
    for number, batch in enumerate(batches):
        compare_kept(batch, [row for row in kept if row["step"] == number + 1])
    return folder / "model", batches, [row for row in rows if "optimizer/loss" in row]


def compare_kept(batch: RolloutBatch, kept: list[dict]) -> None:
    """What the environment said stands as not trained on."""
    assert sorted(row["sequence"] for row in kept) == list(range(EPISODES))
    for row in kept:
        part = slice(*batch.offsets[row["sequence"] :][:2])
        mask = batch.loss_mask[part][int(batch.prompt_lengths[row["sequence"]]) :]
        assert row["untrained"] == np.flatnonzero(~mask).tolist()
        assert mask[row["blocked"]].all()


def expected_mask(ids: np.ndarray, prompt_length: int, tokenizer) -> tuple[np.ndarray, int, float]:
    """Walk through one episode with an environment of our own: which tokens the policy wrote, its turns, its return."""
    text = tokenizer.decode(ids[:prompt_length])
    environment = LuckySudoku()
    for seed in environment_seeds():
        observation, info = environment.reset(seed=seed)
        if text == f"user: {observation}{info['suffix']}\nassistant:":
            break
    else:
        raise AssertionError(f"no environment begins like this: {text}")
    mask, place, total = np.zeros(len(ids), dtype=bool), prompt_length, 0.0
    for turn in range(1, TURNS + 1):
        stop = place
        while stop < place + RESPONSE:
            stop += 1
            if ids[stop - 1] == tokenizer.eos_token_id:
                break
        mask[place:stop] = True
        action = tokenizer.decode(ids[place:stop], skip_special_tokens=True)
        observation, reward, terminated, _, info = environment.step(action)
        total += float(reward)
        if terminated or turn == TURNS:
            break
        said = tokenizer.encode(f"\nuser: {observation}\n{info['suffix']}\nassistant:")
        place = stop + len(said)
        assert ids[stop:place].tolist() == said
    assert stop == len(ids)
    return mask, turn, total


def environment_seeds() -> list[int]:
    """As `EnvironmentTask` draws them for `task.seed` 0."""
    return [int(np.random.SeedSequence((0, number)).generate_state(1)[0]) for number in range(9)]


@pytest.mark.slow
def test_every_token_of_every_batch(run):
    model, batches, rows = run
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for batch, row in zip(batches, rows, strict=True):
        assert len(batch) == EPISODES
        turns, returns = [], []
        for b in range(EPISODES):
            part = slice(batch.offsets[b], batch.offsets[b + 1])
            mask, count, total = expected_mask(batch.token_ids[part], int(batch.prompt_lengths[b]), tokenizer)
            np.testing.assert_array_equal(batch.loss_mask[part], mask)
            turns.append(count)
            returns.append(total)
        assert max(turns) > 1
        assert row["episode/turns_mean"] == np.mean(turns)
        assert row["reward/mean"] == pytest.approx(np.mean(returns), abs=1e-6)
        # What the loss counts are the policy's tokens alone.
        assert row["policy/tokens"] == batch.loss_mask.sum()
        assert row["response/length_mean"] == batch.loss_mask.sum() / EPISODES
        assert (batch.mu_logp[~batch.loss_mask] == 0).all()
        assert (batch.topk_ids[~batch.loss_mask] == -1).all()
        assert (batch.topk_ids[batch.loss_mask] >= 0).all()


@pytest.mark.slow
def test_routes_and_log_mu_of_the_first_batch_are_those_of_transformers(run):
    """Tokens of the environment, and the last of each turn, were first fed to the model by the next turn's prefill."""
    model, batches, _ = run
    batch = batches[0]
    assert batch.routes.valid.sum() == len(batch.token_ids) - EPISODES
    check_record(model, batch, LAYERS)


@pytest.mark.slow
def test_the_trainer_replayed_every_route(run):
    _, batches, rows = run
    assert rows[0]["parity/max_abs_logp_gap"] < 1e-3
    for batch, row in zip(batches, rows, strict=True):
        assert row["r3/replayed_routings"] == LAYERS * (len(batch.token_ids) - EPISODES)
        assert row["r3/gap_routings"] == LAYERS * EPISODES
        assert row["optimizer/skipped_steps"] == 0
    assert any(row["optimizer/grad_norm"] > 0 for row in rows)
