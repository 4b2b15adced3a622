"""What the warm-up learns from, that it repeats itself bit for bit, and that it does not pass off a failure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from examples.tiny_moe_dppo.demonstrations import Demonstrator
from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint
from examples.tiny_moe_dppo.warm_up import WarmUpFailed, WarmUpPlan, measure, warm_up
from megatron_dppo.errors import UserError
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.config import TaskConfig

SHORT = {"batch_size": 16, "correct_steps": 3, "careless_steps": 2, "measure_from": 2, "measure_every": 1}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def task(tokenizer):
    sums = TaskConfig(
        dataset="chain_sum",
        parameters={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        prompt="{metadata[expression]}",
        answer_pattern=r"(?P<answer>-?\d+)",
        train_size=1500,
        held_out_size=200,
    )
    return build_task(sums, tokenizer)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decoded_answers(batch, tokenizer):
    return [
        tokenizer.decode(ids[mask], skip_special_tokens=True)
        for ids, mask in zip(batch.token_ids, batch.is_answer, strict=True)
    ]


def test_demonstrations_are_right_or_off_by_a_little(task, tokenizer):
    prompts = task.prompts(0, 300)
    right = {p.text: int(p.answer) for p in prompts}
    for slip, low, high in ((0.0, 1.0, 1.0), (0.6, 0.3, 0.5), (1.0, 0.0, 0.0)):
        batch = Demonstrator(prompts, tokenizer, seed=1).show(300, slip)
        errors = []
        for ids, mask, answer in zip(batch.token_ids, batch.is_answer, decoded_answers(batch, tokenizer), strict=True):
            start = int(mask.nonzero()[0])
            errors.append(int(answer) - right[tokenizer.decode(ids[:start])])
            assert ids[mask][-1] == tokenizer.eos_token_id
        assert max(abs(e) for e in errors) <= 3
        assert low <= sum(e == 0 for e in errors) / len(errors) <= high


def test_demonstrator_shows_every_question_once_an_epoch(task, tokenizer):
    prompts = task.prompts(0, 40)
    demonstrator = Demonstrator(prompts, tokenizer, seed=0)
    seen = []
    for _ in range(2):
        batch = demonstrator.show(20, 0.0)
        for ids, mask in zip(batch.token_ids, batch.is_answer, strict=True):
            seen.append(tokenizer.decode(ids[: int(mask.nonzero()[0])]))
    assert sorted(seen) == sorted(p.text for p in prompts)


def test_answers_that_are_no_whole_numbers_are_refused(tokenizer):
    task = build_task(TaskConfig(dataset="letter_counting", train_size=3, held_out_size=2), tokenizer)
    Demonstrator(task.prompts(0, 3), tokenizer, seed=0)
    words = build_task(TaskConfig(dataset="spell_backward", train_size=3, held_out_size=2), tokenizer)
    with pytest.raises(UserError, match="demonstrates whole numbers"):
        Demonstrator(words.prompts(0, 3), tokenizer, seed=0)


def test_same_seed_gives_the_same_files_and_another_seed_others(task, tokenizer, tmp_path):
    plan = WarmUpPlan(**SHORT, accuracy_band=(0.0, 1.0), min_well_formed=0.0)

    def files(name: str, seed: int) -> dict[str, bytes]:
        torch.manual_seed(ord(name[0]))  # the caller's random state must not matter
        model = random_tiny_qwen3_moe(tokenizer, seed)
        warm_up(model, tokenizer, task, seed=seed, plan=plan, report=lambda line: None)
        folder: Path = tmp_path / name
        write_checkpoint(folder, model, tokenizer)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    first, again, other = files("first", 3), files("again", 3), files("other", 4)
    assert first == again
    assert first.keys() == other.keys()
    assert first["model.safetensors"] != other["model.safetensors"]


def test_ending_outside_the_band_is_a_failure(task, tokenizer):
    plan = WarmUpPlan(**SHORT)
    with pytest.raises(WarmUpFailed, match=r"seed 0 ended at held-out accuracy .* wanted \(0.2, 0.42\)"):
        warm_up(random_tiny_qwen3_moe(tokenizer, 0), tokenizer, task, seed=0, plan=plan, report=lambda line: None)


def test_measuring_repeats_itself_and_leaves_the_model_and_the_random_state_alone(task, tokenizer):
    model = random_tiny_qwen3_moe(tokenizer, 0)
    model.train()
    prompts = task.held_out(20)
    state = torch.get_rng_state()
    first = measure(model, tokenizer, task, prompts, samples=2, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert measure(model, tokenizer, task, prompts, samples=2, seed=5) == first
