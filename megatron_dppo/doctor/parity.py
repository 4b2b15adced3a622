"""`megatron-dppo doctor --parity MODEL`: the engine's log-probabilities against the trainer's, same weights."""

from __future__ import annotations

import fcntl
import gc
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megatron_dppo.actor import runtime as actor_runtime
from megatron_dppo.actor.actor import MegatronActor
from megatron_dppo.actor.runtime import TORCHRUN, Runtime
from megatron_dppo.batch import InMemorySource, RolloutBatch
from megatron_dppo.checkpoint.atomic import whole_folder, write_synced
from megatron_dppo.checkpoint.hf_side_files import CONFIG, copy_side_files
from megatron_dppo.checkpoint.random_weights import random_tensors
from megatron_dppo.config.load import build_config, read_tree, section
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError, file_errors
from megatron_dppo.json_object import read_json_object
from megatron_dppo.launch.network import LOOPBACK
from megatron_dppo.launch.nodes import environment, no_rank
from megatron_dppo.models.family import text_fields
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.rollout.engine import RolloutEngine, update_weights
from megatron_dppo.rollout.start import open_engine, transformers_opinion
from megatron_dppo.tasks.tokenizer import load_tokenizer
from megatron_dppo.trainer.mismatch import Mismatch
from megatron_dppo.trainer.requests import Draws, requests_for
from megatron_dppo.trainer.rollouts import training_sampling
from megatron_dppo.trainer.task_suite import build_task_suite
from megatron_dppo.trainer.train import build_actor

DTYPES = ("float32", "bfloat16", "float16")
DEFAULTS = {
    "rollout": {"max_prompt_tokens": 512, "max_response_tokens": 256, "max_num_seqs": 64},
    "trainer": {"prompts_per_step": 16, "samples_per_prompt": 4, "prompts_per_mini_batch": 16},
}
"""Of a comparison without a configuration: 64 answers to sums, 16,384 tokens at most."""


@dataclass(frozen=True)
class Precision:
    """Types of weights and activations on both sides."""

    engine: str
    trainer: str

    @staticmethod
    def parse(text: str) -> Precision:
        """`float32`, or `bfloat16/float32` for the engine's and the trainer's. Raises UserError."""
        parts = text.split("/")
        if len(parts) > 2 or not set(parts) <= set(DTYPES):
            raise UserError(f"--precision {text}: must be one of {', '.join(DTYPES)}, or ENGINE/TRAINER of these")
        return Precision(parts[0], parts[-1])

    def __str__(self) -> str:
        return self.engine if self.engine == self.trainer else f"{self.engine}/{self.trainer}"


@dataclass(frozen=True)
class Comparison:
    """The sampled tokens of one rollout under one precision, `n` of them, and what both sides say of them."""

    mismatch: Mismatch
    """Log-probabilities `[n]`: the engine's, the trainer's with its routes replayed and with live routers."""
    token_ids: np.ndarray
    """int64 `[n]`"""
    sequence: np.ndarray
    """int64 `[n]`, number of the sequence in the rollout"""
    position: np.ndarray
    """int64 `[n]`, place of the token in its sequence, prompt included"""
    differing_tokens: float | None
    """Tokens of prompts and responses that live routers sent to other experts in some layer; None without experts."""
    reference: np.ndarray | None = None
    """Log-probabilities `[n]` by transformers in float32, where they were asked for."""
    reference_differing_tokens: float | None = None
    """Tokens that its routers sent to other experts than the engine's; None without experts."""

    def passes(self) -> Iterator[tuple[str, np.ndarray, np.ndarray, float | None]]:
        """(what is compared, log-probabilities `[n]` of one side and of the other, tokens routed otherwise). First the
        trainer and the engine, by whether R3 is on ("-" without experts), then each and transformers."""
        mismatch = self.mismatch
        if self.differing_tokens is None:
            yield "-", mismatch.log_pi, mismatch.log_mu, None
        else:
            yield "on", mismatch.log_pi, mismatch.log_mu, None
            yield "off", mismatch.log_pi_live, mismatch.log_mu, self.differing_tokens
        if self.reference is not None:
            yield "engine, transformers", mismatch.log_mu, self.reference, self.reference_differing_tokens
            yield "trainer, transformers", mismatch.log_pi, self.reference, None


def parity_config(
    model: Path, config_file: Path | None, overrides: Sequence[str], out: Path, *, random_weights: bool = False
) -> Config:
    """The run whose first rollout is compared: of a file, or `DEFAULTS`, with `overrides`. Raises UserError."""
    tree: dict[str, Any] = dict(DEFAULTS) if config_file is None else read_tree(config_file)
    tree["model"] = {"path": str(model), "random_weights": random_weights}
    where = str(config_file or "the defaults")
    tree["run"] = section(tree, "run", where=where) | {"dir": str(out)}
    config = build_config(Config, tree, overrides, where=where)
    hf_config = load_hf_config(model)
    config.parallel.check_fits(hf_config, int(os.environ.get("WORLD_SIZE", "1")))
    if hf_config.moe is not None and not config.rollout.router_replay:
        raise UserError("doctor --parity: rollout.router_replay=false records no routes to replay; set it to true")
    return config


def measure(
    config: Config, precisions: Sequence[Precision], *, reference: bool = False
) -> tuple[dict[str, Comparison], dict[str, RolloutBatch] | None]:
    """One rollout per precision of the engine, recomputed by the trainer without an update in between: comparisons and,
    on rank 0, rollouts by precision. With `reference` transformers is asked about each rollout as well.

    Engines come first, one after another, on rank 0; they are closed before the trainer takes the memory. Started by
    torchrun it is a collective over all ranks, in `config.parallel`'s layout; otherwise this process is the one rank.
    """
    engines = list(dict.fromkeys(precision.engine for precision in precisions))
    batches = opinions = None
    if actor_runtime.rank() == 0:
        batches = {dtype: _roll_out(config, dtype) for dtype in engines}
        opinions = {dtype: _opinion(config, batch) for dtype, batch in batches.items()} if reference else {}
    with _one_rank():
        runtime = actor_runtime.start(
            config.parallel, seed=config.run.seed, timeout_minutes=config.run.collective_timeout_minutes
        )
        try:
            shared, theirs = runtime.broadcast(batches), runtime.broadcast(opinions)
            found = {
                str(p): _recompute(runtime, config, p.trainer, shared[p.engine], theirs.get(p.engine))
                for p in precisions
            }
            controller = runtime.is_controller
        finally:
            actor_runtime.stop()
    return found, {str(precision): shared[precision.engine] for precision in precisions} if controller else None


def compare(actor: MegatronActor, batch: RolloutBatch, opinion: RolloutBatch | None = None) -> Comparison:
    """Two forward passes of the trainer over the engine's tokens; `opinion` is what transformers says of the same.
    Collective."""
    source = InMemorySource.of(batch)
    tokens = int(source.trained.sum())
    replayed = actor.parity(source, replay=True, keep=tokens).tokens
    live = actor.parity(source, replay=False, keep=tokens)
    sequence, position = replayed[:, 3].astype(np.int64), replayed[:, 4].astype(np.int64) + 1  # t predicts token t + 1
    return Comparison(
        mismatch=Mismatch.of(replayed, live.tokens),
        token_ids=replayed[:, 2].astype(np.int64),
        sequence=sequence,
        position=position,
        differing_tokens=live.metrics.get("differing_tokens"),
        reference=None if opinion is None else opinion.mu_logp[batch.offsets[sequence] + position],
        reference_differing_tokens=None if opinion is None else _routed_otherwise(batch, opinion),
    )


def spell(tokenizer: PreTrainedTokenizerBase, batch: RolloutBatch, sequence: int, position: int) -> tuple[str, str]:
    """(the 12 tokens before, the token) as text."""
    ids = batch.token_ids[batch.offsets[sequence] : batch.offsets[sequence + 1]]
    return tokenizer.decode(ids[max(0, position - 12) : position]), tokenizer.decode(ids[position : position + 1])


def _roll_out(config: Config, dtype: str) -> RolloutBatch:
    tokenizer = load_tokenizer(config.model.path)
    suite = build_task_suite(config, tokenizer)
    try:
        if suite.player is not None:
            kind = config.task.kind
            raise UserError(f"doctor --parity: task.kind={kind} is not compared; set another, or leave CONFIG out")
        prompts = suite.task.prompts(0, config.trainer.prompts_per_step)
    finally:
        suite.close()
    requests = requests_for(prompts, config.trainer.samples_per_prompt, Draws(config.run.seed, 0))
    rollout = config.rollout.model_copy(update={"dtype": dtype})
    if config.model.random_weights:
        rollout = rollout.model_copy(update={"load_format": "dummy"})
    with no_rank():
        engine = open_engine(config.model.path, rollout)
        try:
            if config.model.random_weights:
                _give_random_weights(engine, config)
            return engine.generate(requests, training_sampling(config.rollout), training=True)
        finally:
            engine.close()


def _opinion(config: Config, batch: RolloutBatch) -> RolloutBatch:
    rollout, prepare = config.rollout, []
    if config.model.random_weights:
        rollout = rollout.model_copy(update={"load_format": "dummy"})
        prepare.append(lambda engine: _give_random_weights(engine, config))
    with no_rank():
        return transformers_opinion(config.model.path, rollout, batch, *prepare)


def _routed_otherwise(batch: RolloutBatch, other: RolloutBatch) -> float | None:
    """Tokens that went to other experts in some layer."""
    if batch.routes is None or other.routes is None:
        return None
    mine, theirs = (np.sort(one.experts[batch.routes.valid], axis=-1) for one in (batch.routes, other.routes))
    return float((mine != theirs).any(axis=(1, 2)).sum())


def _give_random_weights(engine: RolloutEngine, config: Config) -> None:
    """Those that `build_actor` draws."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = random_tensors(load_hf_config(config.model.path), config.run.seed, device)
    update_weights(engine, 1, tensors, bucket_mib=config.rollout.weight_sync_bucket_mib)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next engine wants its share of the GPU


def _recompute(
    runtime: Runtime, config: Config, dtype: str, batch: RolloutBatch, opinion: RolloutBatch | None
) -> Comparison:
    actor = build_actor(
        runtime,
        config.model_copy(update={"actor": config.actor.model_copy(update={"dtype": dtype})}),
        load_hf_config(config.model.path),
    )
    found = compare(actor, batch, opinion)
    del actor
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


@contextmanager
def _one_rank() -> Iterator[None]:
    """Where torchrun did not start this process: a job of one rank, whose store takes any port."""
    if any(name in os.environ for name in TORCHRUN):
        yield
        return
    with environment(dict(zip(TORCHRUN, ("0", "1", "0", LOOPBACK, "0"), strict=True))):
        yield


def with_layers(model: Path, layers: int, folder: Path) -> Path:
    """`folder`, holding config.json of the first `layers` layers of `model` and its tokenizer. Ranks that come at the
    same time wait for the first. Raises UserError."""
    whole = load_hf_config(model)
    if not 1 <= layers <= whole.layers:
        raise UserError(f"--layers {layers}: {model} has 1 to {whole.layers}")
    with file_errors(f"cannot write {folder}", "choose another -o folder"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                with whole_folder(folder) as partial:
                    copy_side_files(model, partial, getattr(whole.config, "dtype", None) or torch.float32)
                    raw = read_json_object(partial / CONFIG)
                    fields = text_fields(raw)
                    fields["num_hidden_layers"] = layers
                    if fields.get("layer_types"):
                        fields["layer_types"] = fields["layer_types"][:layers]
                    write_synced(partial / CONFIG, json.dumps(raw, indent=2, ensure_ascii=False) + "\n")
    return folder
