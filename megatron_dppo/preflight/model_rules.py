"""The rules that need the model's folder or the number of training ranks, one function each, as in `rules.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch

from megatron_dppo.config.schema import Config
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.lora.size import check_targets
from megatron_dppo.preflight.finding import Finding, attempt, error, idle, warning
from megatron_dppo.rollout.config import ENGINES
from megatron_dppo.rollout.model_facts import ModelFacts, check_end, check_expert_parallel, check_lengths


def _layout(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    remedy = f"the model has to fit {ranks} ranks"
    yield from attempt("layout", remedy, lambda: config.parallel.check_fits(model, ranks))


def _recompute(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    if config.actor.recompute == "activation" and model.moe is None:
        problem = "actor.recompute=activation computes parts of experts anew, and the model has none"
        yield error("layout", problem, "set it to none, selective or full")


def _sequences(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    """Every data-parallel rank trains on something in every gradient step."""
    trainer, data = config.trainer, config.parallel.data(ranks)
    sequences = trainer.prompts_per_mini_batch * trainer.samples_per_prompt
    if sequences < data:
        yield error(
            "batch",
            f"a gradient step has {sequences} sequences for {data} data-parallel ranks: some would train on nothing",
            "raise trainer.prompts_per_mini_batch, or use more model parallelism",
        )


def _engines(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    """Colocated engines divide the trainer's GPUs among them."""
    tensor = config.rollout.tensor_parallel
    if config.rollout.placement == "colocated" and ranks % tensor:
        problem = f"rollout.placement=colocated: {ranks} ranks are not a multiple of rollout.tensor_parallel={tensor}"
        yield error("engines", problem, "change one of them")


def _reduction(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    """Gradients are rounded for a way that they go."""
    parallel = config.parallel
    dense = ranks // (parallel.tensor * parallel.pipeline)
    experts = ranks // (parallel.expert_tensor * parallel.expert * parallel.pipeline)
    if config.optimizer.grad_reduce_dtype == "float32" or dense > 1 or (model.moe is not None and experts > 1):
        return
    problem = f"optimizer.grad_reduce_dtype=bfloat16 does nothing: no two of {ranks} ranks have the same parameters"
    yield idle("optimizer", problem)


def _padded_experts(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    """vLLM fills the experts of a worker up to whole blocks of FP8 scales."""
    rollout = config.rollout
    workers = 1 if rollout.expert_parallel else rollout.tensor_parallel
    if rollout.quantization != "fp8" or model.moe is None or workers == 1:
        return
    width = model.moe.intermediate_size // workers
    problem = (
        f"rollout.quantization=fp8 with rollout.tensor_parallel={workers}: each GPU has {width} rows of every expert, "
        f"and vLLM pads them to {-(-width // 128) * 128}: memory and time for nothing"
    )
    if width % 128:
        yield warning("engines", problem, "set rollout.expert_parallel=true, or lower rollout.tensor_parallel")


def _bucket_store(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    """Ray writes what finds no room to disk."""
    rollout, each = config.rollout, getattr(torch, config.actor.dtype).itemsize
    if rollout.weight_transfer != "object_store":
        return
    sizes = [prod(shape) * each for shape in model.tensors.values()]
    needed = min(sum(sizes), 2 * max(rollout.weight_sync_bucket_mib << 20, *sizes))
    if needed > rollout.object_store_mib << 20:
        yield warning(
            "engines",
            f"rollout.object_store_mib={rollout.object_store_mib}: rollout.weight_transfer=object_store has up to "
            f"{-(-needed // 2**20)} MiB of weights in the store, and what finds no room goes to disk, which takes time",
            "raise it, or lower rollout.weight_sync_bucket_mib",
        )


def _positions(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    yield from attempt("lengths", "", lambda: check_lengths(model, config.rollout))


def _pack(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    """The longest sequence that the engine may return fits a microbatch: a run would end there, hours after its
    start."""
    longest = config.parallel.packed_length(config.rollout.max_model_len)
    budget = config.actor.max_tokens_per_microbatch
    if longest > budget and config.actor.long_sequences == "refuse":
        yield error(
            "lengths",
            f"a sequence may have {longest} tokens (rollout.max_prompt_tokens and rollout.max_response_tokens), but "
            f"actor.max_tokens_per_microbatch={budget}: the first that long would stop the run",
            f"set it to {longest}, or actor.long_sequences=alone",
        )


def _replay(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    mode = config.actor.router_replay if model.moe else "none"
    if mode == "r3" and not config.rollout.router_replay:
        yield error(
            "router-replay",
            "actor.router_replay=r3 needs the routes that rollout.router_replay=false does not record",
            "leave that out, or set actor.router_replay=none",
        )
    if mode == "r2" and not config.algorithm.resolve().needs_recomputed_logp:
        yield error(
            "router-replay",
            "actor.router_replay=r2 replays the trainer's own routes of the pass before the update, which the preset "
            f"{config.algorithm.preset} does not run",
            "set actor.router_replay=r3 or choose a preset with a recomputed anchor",
        )


def _routers(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    """Settings of routers that the model has not. Beside adapters a bias may not move anyway (`rules._router_bias`)."""
    of_bias = () if config.lora else ("router_bias_update_rate",)
    if model.moe is None:
        names, what = ("load_balancing_loss", "router_z_loss", *of_bias), "the model has no experts, so no routers"
    elif not model.moe.bias:
        names, what = of_bias, f"the routers of {model.family.model_type} have no correction bias"
    else:
        return
    if given := [f"actor.{name}={value:g}" for name in names if (value := getattr(config.actor, name))]:
        yield idle("algorithm", f"{' and '.join(given)}: {what}")


def _vocabulary(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    preset = config.algorithm.resolve()
    if preset.needs_vocabulary and preset.topk != model.vocab_size:
        yield error(
            "algorithm",
            f"algorithm.divergence={preset.divergence} is computed from all {model.vocab_size} tokens of the "
            f"vocabulary, but K is {preset.topk}",
            f"set algorithm.overrides.topk={model.vocab_size}, or choose a divergence of fewer tokens",
        )


def _adapters(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    lora = config.lora
    if lora is not None:
        yield from attempt("lora", "see docs/lora.md", lambda: check_targets(model, lora))


def _served(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    """What an engine refuses of the model when it starts, after minutes."""
    rollout, folder = config.rollout, model.path
    if rollout.engine not in ENGINES or folder is None:
        return

    def check() -> None:
        facts = ModelFacts.read(folder, router_replay=False)
        check_end(facts, rollout)
        check_expert_parallel(facts, rollout)

    yield from attempt("engines", "see docs/rollouts.md", check)


MODEL: tuple[Callable[[Config, HFConfig, int], Iterator[Finding]], ...] = (
    _layout,
    _recompute,
    _sequences,
    _engines,
    _reduction,
    _padded_experts,
    _bucket_store,
    _served,
    _adapters,
    _replay,
    _routers,
    _pack,
    _positions,
    _vocabulary,
)
