#!/usr/bin/env python3
"""Write a tiny mixture-of-experts checkpoint that calls a Python tool, but too often with the wrong numbers.

    python examples/agent/make_model.py OUT --seed S

It is shown whole conversations: question, call, result, answer. First right ones, then careless ones, whose call has a
digit that is not the question's; see `examples/tiny_moe_dppo/warm_up.py`. The same seed gives the same files on the
same machine.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_moe_dppo.demonstrations import DemonstrationBatch
from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_model, write_checkpoint
from examples.tiny_moe_dppo.warm_up import Measurement, WarmUpPlan, teach
from megatron_dppo.agents.python_tool import run_python
from megatron_dppo.config.load import load_config
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import SEEDS, new_folder, whole
from megatron_dppo.tasks.build import build_task
from megatron_dppo.tasks.task import Prompt

CONFIG = Path(__file__).with_name("agent_dppo.yaml")
CALL, CALLED = '<tool_call>{"name": "python", "arguments": {"code": "', '"}}</tool_call>'
"""How a call begins and ends, in the format of Hermes and Qwen. A token each: a model of this size would spend its days
on spelling them."""
TOOL = "<|tool|>"
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}
{%- if message['role'] == 'assistant' -%}
{%- for call in message['tool_calls'] or [] -%}
{{ '<tool_call>{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' }}
{{- (call['function']['arguments'] | tojson) + '}</tool_call>' }}
{%- endfor -%}
{{ '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
PLAN = WarmUpPlan(correct_steps=300, slip=0.7, samples_per_prompt=1)


def agent_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte, per role, and per beginning and end of a call."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [TOOL]}, replace_extra_special_tokens=False)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (CALL, CALLED)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class Demonstrator:
    """Shows conversations about training questions in shuffled order, epoch after epoch."""

    def __init__(self, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._prompts, self._tokenizer, self._random = prompts, tokenizer, random.Random(seed)
        self._left: list[Prompt] = []

    def show(self, count: int, slip: float) -> DemonstrationBatch:
        """`count` conversations; with probability `slip` a digit of the call is another one than the question's."""
        rows = [self._conversation(slip) for _ in range(count)]
        width = max(len(ids) for ids, _ in rows)
        token_ids = torch.full((count, width), int(self._tokenizer.pad_token_id), dtype=torch.long)
        own = torch.zeros(count, width, dtype=torch.bool)
        for row, (ids, policy) in enumerate(rows):
            token_ids[row, : len(ids)] = torch.tensor(ids)
            own[row, : len(ids)] = torch.tensor(policy)
        return DemonstrationBatch(token_ids, own)

    def _conversation(self, slip: float) -> tuple[list[int], list[bool]]:
        if not self._left:
            self._left = self._random.sample(self._prompts, len(self._prompts))
        prompt = self._left.pop()
        code = list(prompt.metadata["expression"])
        if self._random.random() < slip:
            place = self._random.choice([place for place, letter in enumerate(code) if letter.isdigit()])
            code[place] = self._random.choice(sorted({*"123456789"} - {code[place]}))
        result = result_of("".join(code))
        parts = [
            (prompt.prompt_ids.tolist(), False),
            (self._tokenizer.encode(f"{CALL}{''.join(code)}{CALLED}<|end|>"), True),
            (self._tokenizer.encode(f"{TOOL}{result}<|assistant|>"), False),
            (self._tokenizer.encode(f"{result}<|end|>"), True),
        ]
        return [i for ids, _ in parts for i in ids], [own for ids, own in parts for _ in ids]


@functools.lru_cache(maxsize=1 << 16)
def result_of(code: str) -> str:
    """What the tool says. Sums of the demonstrations are added up here, whatever else a model writes in the sandbox."""
    terms = code.replace("-", "+ -").replace(" ", "").split("+")
    if all(term.removeprefix("-").isdecimal() and not term.removeprefix("-").startswith("0") for term in terms):
        return str(sum(map(int, terms)))
    return run_python(code, most=16)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], seed: int
) -> Measurement:
    """Sample a conversation about every prompt: how many answers are right, and how many come after a call."""
    begun = [prompt.prompt_ids.tolist() for prompt in prompts]
    first = _sample(model, tokenizer, begun, seed)
    asked, called = [], []
    for ids, said in zip(begun, first, strict=True):
        text = tokenizer.decode(said, skip_special_tokens=True)
        called.append(text.startswith(CALL) and text.endswith(CALLED))
        result = result_of(text[len(CALL) : -len(CALLED)]) if called[-1] else ""
        asked.append([*ids, *said, *tokenizer.encode(f"{TOOL}{result}<|assistant|>")])
    answers = [tokenizer.decode(said, skip_special_tokens=True) for said in _sample(model, tokenizer, asked, seed + 1)]
    right = [c and a == p.answer for c, a, p in zip(called, answers, prompts, strict=True)]
    return Measurement(accuracy=sum(right) / len(right), well_formed=sum(called) / len(called))


def _sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, begun: Sequence[list[int]], seed: int
) -> list[list[int]]:
    """At temperature 1, up to the token that ends a turn."""
    width = max(map(len, begun))
    ids = torch.full((len(begun), width), int(tokenizer.pad_token_id), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(begun):
        ids[row, width - len(one) :], mask[row, width - len(one) :] = torch.tensor(one), 1
    model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drawn = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=24
        )
    model.train()
    said = [row.tolist() for row in drawn[:, width:]]
    end = tokenizer.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in said]


def make(out: Path, seed: int) -> None:
    """Write the model of `seed` to `out`."""
    torch.set_num_threads(1)  # sums over another number of threads differ in the last bit
    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    tokenizer = agent_tokenizer()
    model = random_tiny_model(tokenizer, seed, "qwen3_moe")
    task = build_task(load_config(CONFIG).task, tokenizer)
    demonstrator = Demonstrator(task.prompts(0, task.epoch_size), tokenizer, seed)
    held_out = task.held_out(task.held_out_size)
    teach(
        model,
        demonstrator.show,
        lambda: measure(model, tokenizer, held_out, seed),
        seed=seed,
        plan=PLAN,
        report=lambda line: print(line, flush=True),
    )
    write_checkpoint(out, model, tokenizer)
    print(f"model made in {time.monotonic() - started:.0f} s ({time.process_time():.0f} s of CPU)")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=new_folder, metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument("--seed", type=whole(0, SEEDS), default=0, help="of the weights and of the warm-up (default 0)")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: make(arguments.out, arguments.seed))


if __name__ == "__main__":
    raise SystemExit(main())
