"""Supervised warm-up of a tiny model, so that reinforcement learning finds it partly right.

Two lessons. First correct demonstrations, until the sums are learned. Then, briefly and with small steps, careless
ones: their answers are well-formed but mostly off by a little, and the model's samples become as unreliable as the
demonstrator. The second lesson stops when the accuracy of real samples on held-out prompts enters a band. What is left
is a policy whose format is right and whose answers are right too seldom, although it has learned what would make them
right: the state in which a verifiable reward teaches fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.tiny_moe_dppo.demonstrations import DemonstrationBatch, Demonstrator
from megatron_dppo.tasks.prompt_set import PromptSet
from megatron_dppo.tasks.task import Prompt


@dataclass(frozen=True, kw_only=True)
class WarmUpPlan:
    """The two lessons."""

    batch_size: int = 128
    """Demonstrations per step."""
    correct_steps: int = 250
    """Steps of the first lesson."""
    muon_lr: float = 1e-2
    """First lesson, attention matrices (Muon learns these sums in about half of Adam's steps)."""
    adam_lr: float = 3e-3
    """First lesson, everything else."""
    slip: float = 0.65
    """Second lesson: fraction of wrong demonstrations, reached after `slip_ramp_steps`."""
    slip_ramp_steps: int = 40
    careless_lr: float = 3e-4
    """Second lesson, Adam on everything."""
    careless_steps: int = 100
    """Most steps of the second lesson."""
    measure_from: int = 20
    """Step of the second lesson at which measuring begins."""
    measure_every: int = 5
    """Steps between two measurements."""
    accuracy_band: tuple[float, float] = (0.2, 0.42)
    """The second lesson ends at the first measurement at or below the upper edge; below the lower edge is a failure."""
    min_well_formed: float = 0.95
    """Least fraction of well-formed samples at the end."""
    samples_per_prompt: int = 4


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Fractions among samples at temperature 1 on held-out prompts."""

    accuracy: float
    well_formed: float


class WarmUpFailed(RuntimeError):
    """The warm-up did not end in its band."""


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: PromptSet,
    *,
    seed: int,
    plan: WarmUpPlan | None = None,
    report: Callable[[str], None] = print,
) -> Measurement:
    """Train `model` in place on `task`'s training prompts by `plan`; return the last measurement.

    Nothing depends on time or on the global random state, so that a seed gives the same weights bit for bit on the same
    machine with the same number of threads. Raises WarmUpFailed outside the band, UserError for a task without
    whole-number answers.
    """
    plan = plan or WarmUpPlan()
    demonstrator = Demonstrator(task.prompts(0, task.epoch_size), tokenizer, seed)
    held_out = task.held_out(task.held_out_size)

    def measured() -> Measurement:
        return measure(model, tokenizer, task, held_out, samples=plan.samples_per_prompt, seed=seed)

    return teach(model, demonstrator.show, measured, seed=seed, plan=plan, report=report)


def teach(
    model: PreTrainedModel,
    show: Callable[[int, float], DemonstrationBatch],
    measured: Callable[[], Measurement],
    *,
    seed: int,
    plan: WarmUpPlan,
    report: Callable[[str], None] = print,
) -> Measurement:
    """Both lessons, from demonstrations that `show(count, slip)` gives; see `warm_up`. The failure names the `seed`."""
    model.train()

    optimizers = _first_lesson_optimizers(model, plan)
    schedule = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _rise_and_fall(step, plan)) for o in optimizers]
    for step in range(1, plan.correct_steps + 1):
        loss = _step(model, optimizers, show(plan.batch_size, 0.0))
        for scheduler in schedule:
            scheduler.step()
        if step % 50 == 0 or step == plan.correct_steps:
            report(f"warm-up, correct demonstrations: step {step}/{plan.correct_steps}, loss {loss:.3f}")

    found = measured()
    report(f"warm-up, correct demonstrations: held-out accuracy {found.accuracy:.3f}")
    careless = [torch.optim.Adam(model.parameters(), lr=plan.careless_lr, betas=(0.9, 0.99))]
    for step in range(1, plan.careless_steps + 1):
        slip = plan.slip * min(1.0, step / plan.slip_ramp_steps)
        _step(model, careless, show(plan.batch_size, slip))
        if step < plan.measure_from or step % plan.measure_every:
            continue
        found = measured()
        report(
            f"warm-up, careless demonstrations: step {step}, held-out accuracy {found.accuracy:.3f}, "
            f"well-formed {found.well_formed:.3f}"
        )
        if found.accuracy <= plan.accuracy_band[1] and found.well_formed >= plan.min_well_formed:
            if found.accuracy < plan.accuracy_band[0]:
                break
            return found
    raise WarmUpFailed(
        f"the warm-up with seed {seed} ended at held-out accuracy {found.accuracy:.3f} and "
        f"{found.well_formed:.3f} well-formed, wanted {plan.accuracy_band} and {plan.min_well_formed}"
    )


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: PromptSet,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    seed: int,
    max_new_tokens: int = 8,
) -> Measurement:
    """Sample `samples` responses to every prompt at temperature 1, and let the task score them."""
    width = max(len(prompt.prompt_ids) for prompt in prompts)
    ids = torch.full((len(prompts), width), tokenizer.pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # on the left, so that every response starts in the same column
        ids[row, width - len(prompt.prompt_ids) :] = torch.from_numpy(prompt.prompt_ids).long()
        mask[row, width - len(prompt.prompt_ids) :] = 1
    training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drawn = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=samples,
            max_new_tokens=max_new_tokens,
        )
    model.train(training)
    responses = tokenizer.batch_decode(drawn[:, width:], skip_special_tokens=True)
    assert task.grader is not None
    rewards = task.grader.score([prompt for prompt in prompts for _ in range(samples)], responses)
    return Measurement(accuracy=float(rewards.correct.mean()), well_formed=float(rewards.well_formed.mean()))


def _first_lesson_optimizers(model: PreTrainedModel, plan: WarmUpPlan) -> list[torch.optim.Optimizer]:
    def by_muon(name: str, parameter: torch.Tensor) -> bool:
        return ".self_attn." in name and parameter.ndim == 2

    named = list(model.named_parameters())
    return [
        torch.optim.Muon(
            [p for n, p in named if by_muon(n, p)],
            lr=plan.muon_lr,
            weight_decay=0.0,
            ns_steps=3,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.Adam([p for n, p in named if not by_muon(n, p)], lr=plan.adam_lr, betas=(0.9, 0.99)),
    ]


def _rise_and_fall(step: int, plan: WarmUpPlan) -> float:
    """Learning-rate factor: up over 20 steps, level to the middle, then down to a twentieth."""
    done = step / plan.correct_steps
    return min(1.0, (step + 1) / 20) * min(1.0, max(0.05, 2 * (1 - done)))


def _step(model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer], batch: DemonstrationBatch) -> float:
    """One step on the mean cross-entropy of the answers' tokens; returns it."""
    logits = model(input_ids=batch.token_ids[:, :-1], use_cache=False).logits
    wanted = batch.is_answer[:, 1:]
    loss = F.cross_entropy(logits[wanted], batch.token_ids[:, 1:][wanted])
    model.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()
