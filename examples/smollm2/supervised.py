#!/usr/bin/env python3
"""A short supervised phase after which the experts of an upcycled mixture differ, on worked sums with slips.

    python examples/smollm2/supervised.py MODEL OUT [--steps 200] [--lr 2e-4] [--slip 0.2]

The mixture of `make_model.py` is one MLP copied: a wrong route changes nothing there, so there is nothing for router
replay to gain. Here the model imitates "27 - 4 = 23, 23 + 13 = 36. The answer is 36." on training questions of
`smollm2.yaml`; each step of the working is off by a little with probability `--slip`, and what follows goes on from it.
What is left is a mixture whose experts differ, that writes its working and is right too seldom. Printed at the end: how
far the experts are from their mean, and what other routes do to the log-probabilities.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_dppo.config.load import load_config
from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import SEEDS, model_folder, new_folder, real, whole
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.task import Prompt

CONFIG = Path(__file__).with_name("smollm2.yaml")
BATCH = 64


def worked(expression: str, slip: float, draw: random.Random) -> str:
    """`27 - 4 + 13` from left to right: "27 - 4 = 23, 23 + 13 = 36. The answer is 36."

    With probability `slip` each result is off by one, two or ten.
    """
    first, *rest = re.findall(r"[+-]|\d+", expression)
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        if draw.random() < slip:
            result += draw.choice((-10, -2, -1, 1, 2, 10))
        steps.append(f"{total} {sign} {term} = {result}")
        total = result
    return f"{', '.join(steps)}. The answer is {total}."


def teach(
    model: PreTrainedModel,
    solved: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    steps: int,
    lr: float,
    seed: int,
) -> None:
    """Adam on the answers of `solved` (ids of a question, ids of its answer), rates falling to a tenth."""
    device = model.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    draw = random.Random(seed)
    model.train()
    for step in range(1, steps + 1):
        rows = draw.sample(solved, min(BATCH, len(solved)))
        width = max(len(question) + len(answer) for question, answer in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for row, (question, answer) in enumerate(rows):
            end = len(question) + len(answer)
            ids[row, :end] = torch.tensor([*question, *answer])
            labels[row, len(question) : end] = torch.tensor(answer)
        logits = model(input_ids=ids.to(device), use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten().to(device))
        optimizer.param_groups[0]["lr"] = lr * min(step / 10, 1.0, 0.1 + 0.9 * 2 * (1 - step / steps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}, loss {loss.item():.3f}", flush=True)
    model.eval()


def distances(model: PreTrainedModel) -> list[float]:
    """Per layer: how far the experts' matrices are from their mean, of the mean's norm."""
    found = []
    for layer in model.model.layers:
        stacked = [one.detach() for one in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj)]
        spread = sum(float((one - one.mean(0)).square().sum()) / len(one) for one in stacked)
        found.append((spread / sum(float(one.mean(0).square().sum()) for one in stacked)) ** 0.5)
    return found


def route_gaps(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """|log p - log p'| of the tokens `ids` `[B, T]`, where p' has every layer's routers in another expert's place."""

    def logps() -> torch.Tensor:
        with torch.no_grad():
            logp = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)

    before = logps()
    routers = [layer.mlp.gate.weight for layer in model.model.layers]
    kept = [router.detach().clone() for router in routers]
    with torch.no_grad():
        for router in routers:
            router.copy_(router.roll(1, 0))
    after = logps()
    with torch.no_grad():
        for router, weight in zip(routers, kept, strict=True):
            router.copy_(weight)
    return (before - after).abs().flatten()


def make(chosen: argparse.Namespace) -> None:
    out: Path = chosen.out
    transformers_logging.disable_progress_bar()
    torch.manual_seed(chosen.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32, experts_implementation="eager")
    if not hasattr(model.model.layers[0].mlp, "experts"):
        raise UserError(f"{chosen.model} is no mixture of experts; make one with make_model.py --experts 8")
    model.to(device)
    task = build_task(load_config(CONFIG).task, tokenizer)
    draw = random.Random(chosen.seed)
    eos = tokenizer.eos_token_id

    def solved(prompt: Prompt) -> tuple[list[int], list[int]]:
        text = worked(prompt.metadata["expression"], chosen.slip, draw)
        return prompt.prompt_ids.tolist(), [*tokenizer.encode(text, add_special_tokens=False), eos]

    teach(
        model,
        [solved(prompt) for prompt in task.prompts(0, task.epoch_size)],
        steps=chosen.steps,
        lr=chosen.lr,
        seed=chosen.seed,
    )
    apart = distances(model)
    text = " ".join(worked(prompt.metadata["expression"], 0.0, draw) for prompt in task.held_out(64))
    ids = torch.tensor(tokenizer.encode(text)[: 8 * 128], device=device)
    gaps = route_gaps(model, ids[: len(ids) // 8 * 8].view(8, -1))
    print(
        f"experts are {min(apart):.4f} to {max(apart):.4f} of their mean's norm apart; other routes change a token's "
        f"log-probability by {gaps.mean():.4f} nats in the mean, {gaps.quantile(0.99):.3f} at the 99th percentile"
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=model_folder, metavar="MODEL")
    parser.add_argument("out", type=new_folder, metavar="OUT")
    parser.add_argument("--steps", type=whole(), default=200)
    parser.add_argument("--lr", type=real(), default=2e-4)
    parser.add_argument("--slip", type=real(), default=0.2, help="probability that a step of the working is wrong")
    parser.add_argument("--seed", type=whole(0, SEEDS), default=0)
    chosen = parser.parse_args(arguments)
    return exit_status(lambda: make(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
