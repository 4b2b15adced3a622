"""`megatron-dppo evaluate`: a model on files of questions, without training it."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from megatron_dppo.agents.response_text import response_texts
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.checkpoint.atomic import replace_synced
from megatron_dppo.checkpoint.hf_files import WEIGHTS, require_unchanged
from megatron_dppo.config.load import build_config, read_tree, section
from megatron_dppo.config.trainer import EvaluationConfig
from megatron_dppo.config_base import ConfigModel
from megatron_dppo.errors import UserError, file_errors
from megatron_dppo.launch.console import terminal
from megatron_dppo.launch.lease import FOLDER as LEASE
from megatron_dppo.launch.lease import lease
from megatron_dppo.launch.network import stay_on_loopback
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.engine import Generates
from megatron_dppo.rollout.seeds import EVALUATION
from megatron_dppo.rollout.start import open_engine
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.task import Prompt
from megatron_dppo.tasks.tokenizer import load_tokenizer
from megatron_dppo.trainer.answers import Answer, AnswerFile
from megatron_dppo.trainer.evaluation import accuracy_metrics, evaluation_sampling
from megatron_dppo.trainer.requests import Draws, requests_for
from megatron_dppo.trainer.task_suite import EvaluationSet, build_sets, judge_responses

_OF_ENGINE = {"engine", "dtype", "quantization", "kv_cache_dtype"}
"""What answers depend on besides; kept with them where it is not the default."""
PAPERS_SAMPLING = {"temperature": 0.7, "top_p": 0.95, "samples": 32}
"""Appendix F; anything else is asked for."""


class EvaluateConfig(ConfigModel):
    """What `evaluate` needs of a run's configuration. Of the task, how it puts questions and scores answers counts."""

    rollout: RolloutConfig = RolloutConfig()
    task: TaskConfig
    evaluation: EvaluationConfig
    seed: int = Field(default=0, ge=0)
    """Of the sampling."""


def evaluate_config(data: Sequence[str], config_file: Path | None, overrides: Sequence[str]) -> EvaluateConfig:
    """The sections `rollout`, `task` and `evaluation` of a run's YAML file, the sets of `data` (`[NAME=]PATH` each,
    instead of the file's), then `overrides`. Raises UserError."""
    tree, where = {} if config_file is None else read_tree(config_file), str(config_file or "the defaults")
    sections = {name: section(tree, name, where=where) for name in ("rollout", "task", "evaluation")}
    if config_file is None:
        sections["evaluation"] = dict(PAPERS_SAMPLING)
    if data:
        sections["evaluation"]["sets"] = [_named(one) for one in data]
    sets = sections["evaluation"].get("sets") or []
    if not sets:
        raise UserError("evaluate: name a file of questions, or a --config that has evaluation.sets")
    if not sections["task"] and isinstance(sets, list) and isinstance(sets[0], dict):
        sections["task"] = {"kind": "data", "data": sets[0].get("data")}
    return build_config(EvaluateConfig, sections, overrides, where=where)


def evaluate_model(model: Path, config: EvaluateConfig, out: Path, *, keep: tuple[float, float] | None = None) -> int:
    """Sample answers to every question of every set, score them and print the table. Returns the exit code.

    Each set's answers go to `out/NAME.jsonl` as they come; what is there already, of the same model and settings, is
    not sampled again, so an evaluation that was stopped goes on. `out/summary.json` has the metrics. With `keep` (from,
    to) the questions of which the model answers a fraction in between, ends included, are written to
    `out/NAME.kept.jsonl`, as a file of questions to train on.
    """
    if keep is not None and not 0 <= keep[0] <= keep[1] <= 1:
        raise UserError(f"--keep {keep[0]:g} {keep[1]:g}: give two fractions from 0 to 1, the smaller first")
    if config.task.kind == "agent":
        raise UserError(
            "evaluate: samples one answer to each question, which is not how task.kind=agent answers; evaluate it "
            "inside a run (evaluation.every, evaluation.sets)"
        )
    if config.rollout.engines > 1:
        raise UserError(
            f"evaluate: rollout.engines={config.rollout.engines}, but one engine answers here; set rollout.engines=1, "
            "and rollout.tensor_parallel to the GPUs that it is to have, or evaluate inside a run (evaluation.sets)"
        )
    if not (model / "config.json").is_file():
        raise UserError(f"{model}: holds no Hugging Face model (config.json)")
    require_unchanged(model, which=lambda name: not name.endswith(WEIGHTS))
    stay_on_loopback()
    date = config.task.date or _date_of(out) or datetime.date.today()
    here = {"date": date, "reward_placement": "local"}  # of no Ray cluster
    config = config.model_copy(update={"task": config.task.model_copy(update=here)})
    tokenizer = load_tokenizer(model)
    sets, report = build_sets(
        config.evaluation,
        config.task,
        tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_response_tokens=config.rollout.max_response_tokens,
        grader=None,
    )
    console = terminal()
    for line in report:
        console.print(line, markup=False, soft_wrap=True)
    with ExitStack() as stack:
        stack.enter_context(lease(out / LEASE, of=str(out)))
        files = [
            stack.enter_context(closing(AnswerFile(out / f"{one.name}.jsonl", _settings(model, config, one))))
            for one in sets
        ]
        missing = [
            [prompt for prompt in one.prompts if not file.has(prompt.index, one.samples)]
            for one, file in zip(sets, files, strict=True)
        ]
        for one in sets:
            stack.callback(one.grader.close)
        if any(missing):
            require_unchanged(model, which=lambda name: name.endswith(WEIGHTS))
            for one, file in zip(sets, files, strict=True):
                one.grader.trust([prompt for prompt in one.prompts if file.has(prompt.index, one.samples)])
                one.grader.prepare()
            console.print("starting the engine")
            engine = open_engine(model, config.rollout)
            stack.callback(engine.close)
            for one, file, prompts in zip(sets, files, missing, strict=True):
                _answer_all(engine, tokenizer, config, one, file, prompts, console)
        results = {one.name: _metrics(one, file) for one, file in zip(sets, files, strict=True)}
        with file_errors(f"{out}/summary.json: cannot be written"):
            replace_synced(out / "summary.json", json.dumps(results, indent=2) + "\n")
        if keep is not None:
            for one, file in zip(sets, files, strict=True):
                console.print(_keep(one, file, keep), markup=False, soft_wrap=True)
    console.print(_table(model, sets, results))
    console.print(f"answers and summary: {out}", markup=False, soft_wrap=True)
    return 0


def _answer_all(
    engine: Generates,
    tokenizer: PreTrainedTokenizerBase,
    config: EvaluateConfig,
    one: EvaluationSet,
    file: AnswerFile,
    prompts: Sequence[Prompt],
    console: Console,
) -> None:
    """Sample the answers to `prompts`, and score and write a question's as they come. The engine has as many again
    to go on with as it decodes together: no question waits for another's longest answer. Where a reward of the user's
    fails on all of a question, this one's answers are written when the reward scored another, or last: what is on the
    disk stays as it is."""
    at_once = max(1, config.rollout.max_num_seqs // one.samples)
    sampling = evaluation_sampling(config.evaluation, config.rollout)

    def sample(prompt: Prompt) -> tuple[Prompt, RolloutBatch]:
        requests = requests_for([prompt], one.samples, Draws(config.seed, 0, EVALUATION))
        return prompt, engine.generate(requests, sampling, training=False)

    came: SimpleQueue[Future[tuple[Prompt, RolloutBatch]]] = SimpleQueue()
    threads = ThreadPoolExecutor(2 * at_once, thread_name_prefix="question")
    scored = told = 0
    held: list[Answer] = []
    try:
        for prompt in prompts:
            threads.submit(sample, prompt).add_done_callback(came.put)
        while scored < len(prompts):
            done = [came.get(), *(came.get() for _ in range(came.qsize()))]
            if answered := [future.result() for future in done if future.exception() is None]:
                part, batches = zip(*answered, strict=True)
                held += _scored(RolloutBatch.concatenate(list(batches)), tokenizer, one, part)
            scored += len(answered)
            doubtful: Collection[int] = one.grader.doubtful if scored < len(prompts) else ()
            file.add(answer for answer in held if answer.prompt not in doubtful)
            held = [answer for answer in held if answer.prompt in doubtful]
            for future in done:
                future.result()  # raises what one failed with, now that the others are on the disk
            written = scored - len({answer.prompt for answer in held})
            if written - told >= at_once or written == len(prompts):
                console.print(f"{one.name}: {written} of {len(prompts)} questions", markup=False)
                told = written
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _scored(
    batch: RolloutBatch, tokenizer: PreTrainedTokenizerBase, one: EvaluationSet, part: Sequence[Prompt]
) -> list[Answer]:
    """The answers to each prompt of `part`, scored."""
    responses = [batch.response_ids(i) for i in range(len(batch))]
    judged = judge_responses(one.grader, tokenizer, part, one.samples, responses, batch.finish_reasons)
    rewards = one.grader.rewards(judged)
    return [
        Answer(
            prompt=part[i // one.samples].index,
            sample=i % one.samples,
            correct=bool(rewards.correct[i]),
            well_formed=bool(rewards.well_formed[i]),
            tokens=int(batch.response_lengths[i]),
            finish_reason=batch.finish_reasons[i],
            response=text,
        )
        for i, text in enumerate(response_texts(tokenizer, responses))
    ]


def _metrics(one: EvaluationSet, file: AnswerFile) -> dict[str, float]:
    rows = [file.answers(prompt.index, one.samples) for prompt in one.prompts]
    flat = [given for row in rows for given in row]
    return accuracy_metrics(np.array([[given.correct for given in row] for row in rows])) | {
        "questions": float(len(rows)),
        "samples": float(one.samples),
        "well_formed": float(np.mean([given.well_formed for given in flat])),
        "response_length": float(np.mean([given.tokens for given in flat])),
        "truncated_fraction": float(np.mean([given.finish_reason == "length" for given in flat])),
    }


def _keep(one: EvaluationSet, file: AnswerFile, band: tuple[float, float]) -> str:
    """Write the rows of the questions whose pass rate lies in `band`, whole, so that they are read and put to the model
    as they were here; returns a line for people."""
    target = file.path.with_suffix(".kept.jsonl")
    rows = []
    for prompt in one.prompts:
        rate = float(np.mean([given.correct for given in file.answers(prompt.index, one.samples)]))
        if band[0] <= rate <= band[1]:
            rows.append(json.dumps({**prompt.metadata, "pass_rate": rate}, default=str) + "\n")
    with file_errors(f"{target}: cannot be written"):
        replace_synced(target, "".join(rows))
    return f"{one.name}: {len(rows)} of {len(one.prompts)} questions kept: {target}"


def _table(model: Path, sets: Sequence[EvaluationSet], results: dict[str, dict[str, float]]) -> Table:
    table = Table(title=Text(str(model)), title_justify="left", caption="95 % bootstrap interval over questions")
    table.add_column("set")
    for header in ("questions", "n", "avg@n", "interval", "pass@n", "tokens", "cut off"):
        table.add_column(header, justify="right")
    for one in sets:
        values = results[one.name]
        table.add_row(
            one.name,
            f"{len(one.prompts)}",
            f"{one.samples}",
            f"{values['accuracy']:.3f}",
            f"{values['accuracy_low']:.3f} to {values['accuracy_high']:.3f}",
            f"{values[f'pass@{one.samples}']:.3f}",
            f"{values['response_length']:,.0f}",
            f"{values['truncated_fraction']:.1%}",
        )
    return table


def _settings(model: Path, config: EvaluateConfig, one: EvaluationSet) -> dict[str, Any]:
    """What an answer depends on: answers made under other settings are not mixed in."""
    digest = hashlib.sha256()
    for prompt in one.prompts:
        accepted = "\n".join((prompt.answer, *prompt.also_accepted))
        digest.update(prompt.prompt_ids.tobytes() + accepted.encode("utf-8", "backslashreplace") + b"|")
    sampling = evaluation_sampling(config.evaluation, config.rollout)
    return {
        "model": str(model.resolve()),
        "weights": _weights(model),
        "prompts": digest.hexdigest(),
        "date": str(config.task.date),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_response_tokens": sampling.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": config.seed,
        "answer_pattern": config.task.answer_pattern,
        "rewards": [
            # A setting that nobody gave is as absent as in files of before it was there.
            reward.model_dump(mode="json", exclude=None if reward.when else {"when"})
            for reward in config.task.rewards
        ],
        **config.rollout.model_dump(include=_OF_ENGINE, exclude_defaults=True),
    }


def _date_of(out: Path) -> datetime.date | None:
    """The day on which the evaluation in `out` began."""
    for file in sorted(out.glob("*.jsonl")):
        with suppress(OSError, ValueError, KeyError, TypeError), open(file, encoding="utf-8") as lines:
            return datetime.date.fromisoformat(json.loads(next(lines, ""))["settings"]["date"])
    return None


def _weights(model: Path) -> str:
    """Changes when the weight files are written anew: a run that goes on exports its model to the same folder. Size and
    time tell; reading the files would take minutes, and a small step leaves most bytes of bfloat16 weights alone."""
    files = sorted(file for file in model.iterdir() if file.suffix in (".safetensors", ".bin"))
    described = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _named(data: str) -> dict[str, Any]:
    """`NAME=PATH` or `PATH`, whose last part without its ending is the name. A path may hold a `=` of its own."""
    name, equals, path = data.partition("=")
    if not equals or "/" in name:
        name, path = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(data).stem), data
    return {"name": name, "data": {"path": path}}
