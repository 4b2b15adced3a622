"""Groups of equal rewards are replaced: which, by what, up to where; and a run that is killed in the middle of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint
from megatron_dppo.rollout.stored import columns_of
from megatron_dppo.tasks.prompt_set import PromptSet
from megatron_dppo.tasks.task import Prompt, Rewards
from megatron_dppo.trainer.dynamic_sampling import Drawn, Groups, draw, reserve
from megatron_dppo.trainer.requests import Draws, requests_for
from tests.batch.rollouts import random_batch
from tests.trainer.test_end_to_end import ROOT, rows

SAMPLES = 2


def prompt(index: int) -> Prompt:
    return Prompt(index=index, prompt_ids=np.arange(3, dtype=np.int32), text="", question="", answer=str(index))


def answered(prompts: Sequence[Prompt], differ: set[int]) -> Groups:
    """Answers of 1 and 2 tokens, the second of which is right where the prompt's number is in `differ`."""
    batch = random_batch(3, [3, 3] * len(prompts), [1, 2] * len(prompts), 4)
    stored = [
        columns_of(batch.select([2 * g, 2 * g + 1]), store="s", key=f"{one.index}", layer_groups=None)[0]
        for g, one in enumerate(prompts)
    ]
    reward = np.array([x for one in prompts for x in (0.0, float(one.index in differ))], dtype=np.float32)
    handle = stored[0].concatenate(stored)
    rewards = Rewards(
        reward=reward, correct=reward > 0, well_formed=reward >= 0, verifier_errors=1, parts={"p": reward}
    )
    return Groups(prompts, handle, [batch.response_ids(i) for i in range(len(batch))], rewards)


def drawn_from(differ: set[int], rounds: int) -> tuple[Drawn, list[list[int]]]:
    """A step of the prompts 0 to 3; those that may come instead are 4, 5, ..."""
    asked: list[list[int]] = []

    def ask(prompts: Sequence[Prompt], before: Sequence[Prompt]) -> Groups:
        assert [one.index for one in before] == [number for numbers in asked for number in numbers]
        asked.append([one.index for one in prompts])
        return answered(prompts, differ)

    def others(start: int, count: int) -> list[Prompt]:
        return [prompt(4 + start + number) for number in range(count)]

    return draw([prompt(number) for number in range(4)], others, ask, rounds=rounds), asked


@pytest.mark.parametrize(
    ("differ", "rounds", "asked", "kept", "dropped"),
    [
        ({0, 1, 2, 3}, 4, [4], [0, 1, 2, 3], []),
        ({1, 3, 4, 7}, 4, [4, 4], [1, 3, 4, 7], [0, 2, 5, 6]),  # two are missing, one in two differs
        ({1, 2, 3, 4, 5}, 4, [4, 2], [1, 2, 3, 4], [0, 5]),  # one is missing of 3/4: two are asked for, one is too many
        ({1, 2, 3}, 2, [4, 2, 2], [1, 2, 3, 0], [4, 5, 6, 7]),  # filled up with the first of the equal ones
        (set(), 2, [4, 4, 4], [0, 1, 2, 3], list(range(4, 12))),
        ({1}, 0, [4], [1, 0, 2, 3], []),
    ],
)
def test_which_groups_are_trained_on(
    differ: set[int], rounds: int, asked: list[int], kept: list[int], dropped: list[int]
) -> None:
    drawn, made = drawn_from(differ, rounds)
    assert [len(numbers) for numbers in made] == asked
    assert [one.index for one in drawn.kept.prompts] == kept
    assert list(drawn.kept.handle.keys) == [f"{number}" for number in kept]
    right = [x for number in kept for x in (0.0, float(number in differ))]
    np.testing.assert_array_equal(drawn.kept.rewards.reward, right)
    np.testing.assert_array_equal(drawn.kept.rewards.parts["p"], right)
    np.testing.assert_array_equal(drawn.kept.handle.trained, [1, 2] * 4)
    assert [len(ids) for ids in drawn.kept.responses] == [1, 2] * 4
    assert (list(drawn.dropped.keys) if drawn.dropped else []) == [f"{number}" for number in dropped]
    filled = sum(number not in differ for number in kept)
    assert {name.removeprefix("dynamic_sampling/"): value for name, value in drawn.metrics.items()} == {
        "rounds": len(asked) - 1,
        "sampled_groups": sum(asked),
        "kept_groups": 4 - filled,
        "filled_groups": filled,
        "dropped_groups": len(dropped),
        "wasted_tokens": 3 * len(dropped),
    }
    assert len(drawn.rewards) == SAMPLES * sum(asked)
    assert drawn.rewards.verifier_errors == len(asked)


def test_a_part_of_a_rollout_has_what_the_whole_has_of_it() -> None:
    whole = answered([prompt(number) for number in range(3)], set()).handle
    again = whole.concatenate([whole.select([number]) for number in range(3)])
    for name, value in vars(whole).items():
        np.testing.assert_array_equal(getattr(again, name), value)
    some = whole.select([2, 0])
    assert some.request_ids == whole.request_ids[4:] + whole.request_ids[:2]
    np.testing.assert_array_equal(some.bounds, [0, 2, 4])
    np.testing.assert_array_equal(some.route_bytes, whole.route_bytes[[2, 0]])
    assert len(whole.select([])) == 0


def test_prompts_that_come_instead_depend_on_the_step_alone() -> None:
    task = PromptSet([], [prompt(number) for number in range(50)], seed=7)
    third = [one.index for one in reserve(task, 3, 4, 10)(0, 40)]
    fourth = [one.index for one in reserve(task, 4, 4, 10)(0, 10)]
    both = [*third, *fourth]
    assert sorted(both) == list(range(50)) or len(set(both)) > 25  # a stretch of an order of its own
    task.prompts(0, 50)
    assert [one.index for one in reserve(task, 3, 4, 10)(5, 3)] == third[5:8]
    assert third != [one.index for one in task.prompts(120, 40)]
    seeds = [request.seed for request in requests_for([prompt(1), prompt(2), prompt(1)], 2, Draws(0, 3))]
    assert len(set(seeds)) == 6  # a prompt that comes again in its step is sampled anew


CONFIG = """
run: {{dir: {run}, seed: 3}}
model: {{path: {model}}}
actor: {{dtype: float32, max_tokens_per_microbatch: 512}}
optimizer: {{lr: 1.0e-3}}
rollout: {{max_prompt_tokens: 32, max_response_tokens: 8, dtype: float32, kv_cache_mib: 64, max_num_seqs: 64,
  dynamic_sampling: 3}}
task:
  kind: data
  data: {{path: {data}}}
  rewards: [{{kind: format, pattern: "(?s)[^a-z]*"}}]
  reward_workers: 1
trainer: {{steps: 3, prompts_per_step: 6, samples_per_prompt: 2, prompts_per_mini_batch: 3, checkpoint_every: 1,
  export_hugging_face: false, parity_check: false, keep_checkpoints: 9}}
evaluation: {{every: 0}}
"""


def start(
    folder: Path, model: Path, *overrides: str, dies_in_call: int | None = None
) -> subprocess.CompletedProcess[str]:
    """A run by itself on one rank. With `dies_in_call` it is killed when it asks the engines for the n-th time."""
    config = folder.with_suffix(".yaml")
    config.write_text(CONFIG.format(run=folder, model=model, data=model / "sums.jsonl"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["-m", "tests.trainer.test_dynamic_sampling", str(dies_in_call or 0), str(config), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False)


@pytest.mark.full
@pytest.mark.parametrize("overrides", [(), ("rollout.schedule=one_step_off",)], ids=["synchronous", "one step off"])
def test_a_run_that_is_killed_within_a_step_goes_on_as_if_it_had_not(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    tokenizer, model = byte_tokenizer(), tmp_path / "model"
    write_checkpoint(model, random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    (model / "sums.jsonl").write_text("".join(f'{{"problem": "{i}+{i}", "answer": {2 * i}}}\n' for i in range(24)))
    done = start(tmp_path / "whole", model, *overrides)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    expected = {row["step"]: row for row in rows(tmp_path / "whole")}
    rounds = [expected[step]["dynamic_sampling/rounds"] for step in (1, 2, 3)]
    assert min(rounds) >= 1
    for row in expected.values():
        kept, filled, dropped = (row[f"dynamic_sampling/{name}_groups"] for name in ("kept", "filled", "dropped"))
        assert kept + filled == 6
        assert kept + filled + dropped == row["dynamic_sampling/sampled_groups"] <= 6 + 3 * 6
        assert row["dynamic_sampling/wasted_tokens"] >= 2 * dropped
    killed = tmp_path / "killed"
    calls = int(1 + rounds[0]) + 2  # within the replacements of the second step
    assert start(killed, model, *overrides, dies_in_call=calls).returncode != 0
    assert [row["step"] for row in rows(killed)] in ([1], [])
    if not (killed / "checkpoints").exists():
        shutil.copytree(tmp_path / "whole/checkpoints/step_00000001", killed / "checkpoints/step_00000001")
        (killed / "checkpoints/latest").write_text("step_00000001\n")
    done = start(killed, model, *overrides, "trainer.resume=true")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    resumed = {row["step"]: row for row in rows(killed)}
    assert sorted(resumed)[-2:] == [2, 3]
    if overrides:  # which weights sampled what of a step that was begun ahead is another question
        assert all(
            row["dynamic_sampling/kept_groups"] + row["dynamic_sampling/filled_groups"] == 6 for row in resumed.values()
        )
        return
    names = [name for name in expected[3] if name.startswith("dynamic_sampling/")]
    for step, before in expected.items():
        for name in (*names, "optimizer/loss", "optimizer/grad_norm", "reward/mean", "policy/entropy", "data/tokens"):
            np.testing.assert_allclose(
                resumed[step][name], before[name], rtol=1e-5, atol=1e-6, err_msg=f"{name} of {step}"
            )


if __name__ == "__main__":
    import signal

    from megatron_dppo.config.load import load_config
    from megatron_dppo.launch import exit_status
    from megatron_dppo.rollout.fleet.fleet import EngineFleet
    from megatron_dppo.trainer.train import train

    left = int(sys.argv[1])
    sampled = EngineFleet.generate_stored

    def generate_stored(self, *arguments, **options):  # type: ignore[no-untyped-def]
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return sampled(self, *arguments, **options)

    EngineFleet.generate_stored = generate_stored  # type: ignore[method-assign]
    sys.exit(exit_status(lambda: train(load_config(Path(sys.argv[2]), sys.argv[3:]))))
