"""The rules, one function each: findings where the rule is broken, none where it is kept.

`SECTIONS` need the configuration alone, `MODEL` (`model_rules.py`) the model's folder and the number of training ranks
as well. What one section can check of itself stands in its class; what needs a machine, beside the code that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_dppo.algorithm import Anchor, Baseline, KLEstimator, KLPlace, PresetError, try_advantages, try_own_code
from megatron_dppo.config.schema import Config
from megatron_dppo.launch.imports import load_callable
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.preflight.finding import Finding, attempt, error, idle, warning
from megatron_dppo.preflight.model_rules import MODEL
from megatron_dppo.rollout.config import ENGINES

VLLM_ONLY = ("enforce_eager", "gpu_memory_utilization", "kv_cache_mib", "enable_prefix_caching")
"""Settings in `rollout` that change what vLLM costs and nothing that is sampled; `rollout.engine=reference` ignores
them."""


def check_sections(config: Config) -> Iterator[Finding]:
    """What can be found without the model."""
    for rule in SECTIONS:
        yield from rule(config)


def check_model(config: Config, model: HFConfig, ranks: int) -> Iterator[Finding]:
    """What the model and the number of training ranks add."""
    for rule in MODEL:
        yield from rule(config, model, ranks)


def _mini_batches(config: Config) -> Iterator[Finding]:
    step, part = config.trainer.prompts_per_step, config.trainer.prompts_per_mini_batch
    if step % part:
        problem = f"trainer.prompts_per_mini_batch={part} does not divide trainer.prompts_per_step={step}"
        yield error("batch", problem, "choose a divisor")


def _oversample(config: Config) -> Iterator[Finding]:
    asked = config.trainer.prompts_per_step * config.rollout.oversample
    if asked and not round(asked):
        yield error(
            "batch",
            f"rollout.oversample={config.rollout.oversample:g} of trainer.prompts_per_step="
            f"{config.trainer.prompts_per_step} is less than one prompt more",
            "raise it, or set it to 0",
        )


def _episodes(config: Config) -> Iterator[Finding]:
    """An episode is sampled turn by turn; whole groups of answers are what is dropped."""
    rollout = config.rollout
    name = "oversample" if rollout.oversample else "dynamic_sampling"
    if config.task.kind in ("environment", "agent") and getattr(rollout, name):
        problem = f"rollout.{name}={getattr(rollout, name):g} drops groups of answers, which is not made for episodes"
        yield error("task", problem, "set it to 0")


def _window(config: Config) -> Iterator[Finding]:
    """A window takes whole groups of answers by when they finish."""
    rollout, problem = config.rollout, "rollout.schedule=window"
    if rollout.schedule != "window":
        return
    if config.task.kind in ("environment", "agent"):
        yield error("task", f"{problem} is not made for episodes", "set it to one_step_off")
        return
    for name in ("oversample", "dynamic_sampling"):
        if value := getattr(rollout, name):
            both = f"{problem} with rollout.{name}={value:g}: both choose among groups"
            yield error("batch", both, f"set rollout.{name} to 0")


def _credit(config: Config) -> Iterator[Finding]:
    """A penalty in the reward is one number for a sequence."""
    kl, agent = config.algorithm.reference_kl, config.task.agent
    if agent and agent.credit == "turn" and kl and kl.place is KLPlace.REWARD:
        yield error(
            "algorithm",
            "algorithm.reference_kl.place=reward with task.agent.credit=turn: the penalty is of whole sequences",
            "set the place to loss, or the credit to episode",
        )


def _dynamic_sampling(config: Config) -> Iterator[Finding]:
    rollout, baseline = config.rollout, config.algorithm.baseline
    problem = f"rollout.dynamic_sampling={rollout.dynamic_sampling}"
    if rollout.dynamic_sampling and baseline is Baseline.NONE:
        remedy = "choose another baseline, or set it to 0"
        yield error("algorithm", f"{problem} with algorithm.baseline=none: groups of equal rewards train too", remedy)
    if rollout.dynamic_sampling and rollout.oversample:
        both = f"{problem} with rollout.oversample={rollout.oversample:g}: both drop groups"
        yield error("batch", both, "set one of them to 0")


def _baseline(config: Config) -> Iterator[Finding]:
    """Every advantage would be 0."""
    baseline, own = config.algorithm.baseline, config.algorithm.advantage
    if config.trainer.samples_per_prompt == 1 and baseline is not Baseline.NONE and own is None:
        yield error(
            "algorithm",
            f"trainer.samples_per_prompt=1 with algorithm.baseline={baseline}: an answer has no others to compare "
            "with, so every advantage would be 0",
            "sample several, or set algorithm.baseline=none",
        )


def _spread(config: Config) -> Iterator[Finding]:
    if config.algorithm.divide_by_std and config.trainer.samples_per_prompt == 1:
        problem = "algorithm.divide_by_std=true with trainer.samples_per_prompt=1: an answer alone has no spread"
        yield idle("algorithm", f"{problem} to divide by")


def _one_gradient_step(config: Config) -> Iterator[Finding]:
    """The policy is the recomputed one until the first step is taken."""
    preset, trainer = config.algorithm.resolve(), config.trainer
    steps = trainer.prompts_per_step // trainer.prompts_per_mini_batch * trainer.ppo_epochs
    blocks, remedy = "its trust region blocks no token", "take several gradient steps"
    if preset.has_band:  # of a ratio to mu
        blocks += ", its band alone does"
    else:
        remedy += ", or a preset with the anchor rollout"
    if preset.anchor is Anchor.RECOMPUTED and steps <= 1:
        yield warning(
            "algorithm",
            f"algorithm.preset={config.algorithm.preset} masks what has moved away from the policy before the update, "
            f"and trainer.prompts_per_mini_batch={trainer.prompts_per_mini_batch} makes one gradient step of a "
            f"rollout, before which nothing has: {blocks}",
            remedy,
        )


def _topk(config: Config) -> Iterator[Finding]:
    preset, recorded = config.algorithm.resolve(), config.rollout.top_k_logprobs
    if preset.needs_topk and preset.topk != recorded:
        yield error(
            "algorithm",
            f"the preset {config.algorithm.preset} uses the top {preset.topk} tokens, but "
            f"rollout.top_k_logprobs={recorded}",
            "leave that out, and set algorithm.overrides.topk to what is wanted",
        )


def _reference_kl(config: Config) -> Iterator[Finding]:
    kl = config.algorithm.reference_kl
    if kl is None:
        return
    if kl.estimator is KLEstimator.TOPK and config.rollout.top_k_logprobs < 1:
        yield error(
            "algorithm",
            "algorithm.reference_kl.estimator=topk needs the engine's top-K log-probabilities, but "
            "rollout.top_k_logprobs=0",
            "leave that out, or set it to K",
        )
    if kl.estimator is KLEstimator.K1 and kl.place is KLPlace.LOSS and kl.coefficient:
        yield warning(
            "algorithm",
            "algorithm.reference_kl: the gradient of k1 in the loss is 0 on average: it keeps the policy near nothing "
            "and adds noise",
            "choose k2 or k3, or algorithm.reference_kl.place=reward",
        )


def _router_bias(config: Config) -> Iterator[Finding]:
    rate = config.actor.router_bias_update_rate
    if rate and config.lora:
        yield error(
            "lora",
            f"actor.router_bias_update_rate={rate:g} would move a part of the model that adapters are not saved with",
            "set it to 0, or train all weights",
        )


def _offload(config: Config) -> Iterator[Finding]:
    yield from attempt("optimizer", "set it to 0", lambda: config.optimizer.check_offload(config.actor.dtype))


def _expert_exchange(config: Config) -> Iterator[Finding]:
    """Megatron-Core's combined schedule runs layers in parts, whose whole it can neither recompute nor, where the first
    part has nothing to train, go backward through; and it hides one kind of exchange alone."""
    if not config.parallel.overlap_expert_exchange:
        return
    problem = "parallel.overlap_expert_exchange=true runs layers in parts:"
    if config.actor.recompute == "full":
        remedy = "set actor.recompute to none, activation or selective"
        yield error("layout", f"{problem} none can be recomputed as a whole, as actor.recompute=full does", remedy)
    if config.actor.token_dispatcher == "allgather":
        yield error(
            "layout",
            f"{problem} of the ways of actor.token_dispatcher it knows alltoall, not allgather",
            "set it to alltoall",
        )
    if config.lora:
        remedy = "set it to false, or train all weights"
        yield error("layout", f"{problem} with adapters alone to train some would have no gradient", remedy)


def _own_code(config: Config) -> Iterator[Finding]:
    """A divergence, a loss and advantages of the user's own do what is asked of them."""
    own, rounds = config.algorithm.advantage, config.rollout.dynamic_sampling
    if own is not None:
        equal_train = yield from attempt("algorithm", "correct it", lambda: try_advantages(own))
        if equal_train and rounds:
            problem = f"rollout.dynamic_sampling={rounds} drops groups of equal rewards, and algorithm.advantage={own}"
            yield warning("algorithm", f"{problem} lets such groups train", "set rollout.dynamic_sampling to 0")
    try:
        try_own_code(config.algorithm.resolve())
    except PresetError as problem:
        yield error("algorithm", str(problem), "")


def _profile(config: Config) -> Iterator[Finding]:
    step, steps = config.trainer.profile_step, config.trainer.steps
    if step is not None and step > steps:
        problem = f"trainer.profile_step={step} is beyond trainer.steps={steps}: nothing would be profiled"
        yield error("trainer", problem, "choose an earlier step, or set it to null")


def _sync_timeout(config: Config) -> Iterator[Finding]:
    """Ranks wait for each other in a collective while the controller waits for an engine, see `broadcast.py: end`."""
    minutes, sync = config.run.collective_timeout_minutes, 2 * config.rollout.sync_timeout_s
    if minutes * 60 < sync:
        wait = f"a weight sync may wait {sync / 60:g} min for an engine that hangs"
        problem = f"ranks give up after {minutes:g} min, but {wait}"
        yield error("timeouts", problem, "raise run.collective_timeout_minutes")


def _engine(config: Config) -> Iterator[Finding]:
    """The engine is there, and does what it is asked for."""
    rollout = config.rollout
    if rollout.engine not in ENGINES:
        yield from attempt(
            "engines", "see docs/rollouts.md", lambda: load_callable(rollout.engine, named="rollout.engine: ")
        )
    if rollout.engine == "reference" and rollout.tensor_parallel > 1:
        yield error(
            "engines",
            f"rollout.tensor_parallel={rollout.tensor_parallel} with rollout.engine=reference, which has one device",
            "set it to 1 and rollout.expert_parallel=false, or rollout.engine=vllm",
        )
    for name, plain in (("quantization", "none"), ("kv_cache_dtype", "auto")):
        value = getattr(rollout, name)
        if rollout.engine == "reference" and value != plain:
            problem = f"rollout.{name}={value} with rollout.engine=reference, which has no such kernels"
            yield error("engines", problem, f"set it to {plain}, or rollout.engine=vllm")


def _unused(config: Config) -> Iterator[Finding]:
    """Settings of vLLM's memory and speed, beside an engine that has neither its cache nor its graphs; and of what a
    trainer keeps of GPUs that it does not lend."""
    rollout, kept = config.rollout, config.optimizer.keep_on_gpu_gib
    if kept and not rollout.takes_turns:
        problem = f"optimizer.keep_on_gpu_gib={kept:g}, but no GPU changes hands, so all optimizer state stays"
        yield warning("engines", problem, "remove it, or set rollout.placement=colocated and enable_sleep=true")
    given = [
        f"rollout.{name}" for name in VLLM_ONLY if getattr(rollout, name) != type(rollout).model_fields[name].default
    ]
    if rollout.engine == "reference" and given:
        yield warning(
            "engines",
            f"rollout.engine=reference makes no use of {', '.join(given)}: keys and values take what "
            "rollout.max_num_seqs sequences need, and nothing is compiled",
            "remove them",
        )


def _hang(config: Config) -> Iterator[Finding]:
    run = config.run
    if run.hang_minutes > run.collective_timeout_minutes:
        yield warning(
            "timeouts",
            f"run.hang_minutes={run.hang_minutes:g} is longer than run.collective_timeout_minutes: "
            "a hung rank would not be named before the others give up",
            "lower run.hang_minutes",
        )


SECTIONS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    _mini_batches,
    _oversample,
    _episodes,
    _window,
    _credit,
    _dynamic_sampling,
    _baseline,
    _spread,
    _one_gradient_step,
    _topk,
    _router_bias,
    _offload,
    _expert_exchange,
    _own_code,
    _reference_kl,
    _engine,
    _unused,
    _profile,
    _sync_timeout,
    _hang,
)
