"""What must be the same when a run is resumed: every setting that changes what it computes next."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_dppo.algorithm import KLEstimator
from megatron_dppo.checkpoint.hf_files import HFFiles
from megatron_dppo.config.load import REMOVED, recorded, sections_of
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError, did_you_mean

RESULT = (
    "run.seed",
    "model.random_weights",
    "lora", "lora.rank", "lora.alpha", "lora.targets", "lora.adapter",
    "actor.dtype", "actor.router_replay", "actor.load_balancing_loss", "actor.router_z_loss",
    "actor.router_bias_update_rate", "actor.megatron.*",
    "optimizer.lr", "optimizer.min_lr", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.decay_steps",
    "optimizer.beta1", "optimizer.beta2", "optimizer.epsilon", "optimizer.weight_decay", "optimizer.clip_grad",
    "optimizer.cpu_offload_fraction", "optimizer.grad_reduce_dtype", "optimizer.min_loss_scale",
    "optimizer.loss_scale_hysteresis", "optimizer.loss_scale_window",
    "algorithm.preset", "algorithm.constants", "algorithm.overrides.*", "algorithm.divergence",
    "algorithm.loss", "algorithm.reference_kl", "algorithm.reference_kl.coefficient",
    "algorithm.reference_kl.estimator", "algorithm.reference_kl.place", "algorithm.baseline",
    "algorithm.divide_by_std", "algorithm.advantage", "algorithm.overlong_filter", "algorithm.normaliser",
    "rollout.engine", "rollout.temperature", "rollout.max_prompt_tokens", "rollout.max_response_tokens",
    "rollout.stop_token_ids",
    "rollout.dtype", "rollout.quantization",
    "rollout.kv_cache_dtype", "rollout.vllm.*", "rollout.schedule", "rollout.max_staleness",
    "rollout.partial_rollouts", "rollout.oversample", "rollout.dynamic_sampling",
    "task.kind", "task.dataset", "task.parameters.*", "task.environment", "task.environment.name",
    "task.environment.factory", "task.environment.parameters.*", "task.environment.max_turns",
    "task.environment.bounds", "task.environment.hidden_state",
    "task.environment.environment", "task.agent", "task.agent.function", "task.agent.command", "task.agent.max_turns",
    "task.agent.environment", "task.agent.bounds", "task.agent.credit", "task.agent.discount",
    "task.agent.edited", "task.agent.other_sampling", "task.agent.tool_format", "task.seed",
    "task.train_size", "task.repeat.*", "task.held_out_size", "task.prompt", "task.system_prompt", "task.chat_template",
    "task.chat_template_kwargs.*",
    "task.answer_pattern", "task.rewards", "task.rewards.name", "task.rewards.weight", "task.rewards.kind",
    "task.rewards.boxed_only", "task.rewards.precision", "task.rewards.ignore_case", "task.rewards.pattern",
    "task.rewards.buffer_tokens", "task.rewards.max_response_tokens", "task.rewards.path", "task.rewards.bounds",
    "task.rewards.environment", "task.rewards.when.*",
    "trainer.prompts_per_step", "trainer.samples_per_prompt", "trainer.prompts_per_mini_batch",
    "trainer.ppo_epochs",
)  # fmt: skip
"""Settings that decide what the next step computes. `*` stands for the entries of a mapping. Of code that a path names
the path is compared, not what the code says: an edit between two parts of a run is not noticed."""
FREE = (
    "run.dir", "run.name", "run.collective_timeout_minutes", "run.hang_minutes",
    "model.path",
    "parallel.*",
    "actor.max_tokens_per_microbatch", "actor.long_sequences", "actor.token_dispatcher", "actor.recompute",
    "actor.recompute_layers", "actor.max_skipped_steps",
    "optimizer.overlap_grad_reduce", "optimizer.overlap_param_gather", "optimizer.keep_on_gpu_gib",
    "optimizer.initial_loss_scale",  # a state has the scale that it had come to
    "rollout.top_k_logprobs", "rollout.router_replay",  # preset and actor say what they use of them; a KL: `facts`
    "rollout.placement", "rollout.weight_transfer", "rollout.load_format", "rollout.tensor_parallel",
    "rollout.expert_parallel", "rollout.enforce_eager", "rollout.gpu_memory_utilization", "rollout.kv_cache_mib",
    "rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.enable_prefix_caching",
    "rollout.enable_sleep", "rollout.compile_cache", "rollout.cpu_threads", "rollout.sequences_per_object",
    "rollout.object_store_mib",
    "rollout.weight_sync_bucket_mib", "rollout.start_timeout_s", "rollout.request_timeout_s",
    "rollout.stall_timeout_s", "rollout.max_engine_failures", "rollout.engines", "rollout.max_tokens_in_flight",
    "rollout.sync_timeout_s",
    "task.data.*", "task.date", "task.environment.sandbox", "task.environment.step_timeout_s",
    "task.agent.timeout_s", "task.agent.at_once", "task.agent.memory_mib",
    "task.rewards.timeout_s", "task.rewards.sandbox", "task.reward_workers",
    "task.reward_placement", "task.reward_memory_mib",
    "trainer.steps", "trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.resume", "trainer.resume_changed",
    "trainer.export_hugging_face", "trainer.profile_step", "trainer.parity_check",
    "evaluation.*", "tracking.*",
)  # fmt: skip
"""The others: layout, budgets, patience, what is kept and shown. Where the data lie is free, what is in them is not
(`facts`); of the model likewise."""
KEPT = ("model.*", "lora", "lora.*", "actor.dtype", "optimizer.cpu_offload_fraction", "rollout.schedule")
"""What a state is of, or laid out by: no other value can go on from it."""
_FOLLOWS = {
    "algorithm.normaliser, resolved": ("algorithm.normaliser", "rollout.max_response_tokens"),
    "rollout.top_k_logprobs": ("algorithm.preset", "algorithm.divergence", "algorithm.overrides"),
    "task, its questions and answers": (
        *("task.kind", "task.data", "task.parameters", "task.seed", "task.train_size", "task.held_out_size"),
        *("task.repeat", "task.prompt", "task.system_prompt", "task.chat_template", "rollout.max_prompt_tokens"),
    ),
}
"""Facts that change with settings, by the beginnings of these."""
_LONGEST = 200
_SAMPLED_TENSORS, _SAMPLED_VALUES = 1000, 2048


def facts(config: Config, *, task: str, weights: str) -> dict[str, Any]:
    """What a training state keeps of its run, to be compared when one goes on from it.

    task, weights  fingerprints of the questions and of the model's weights
    """
    shown, values = (flatten(tree) for tree in (recorded(config), config.model_dump(mode="json")))
    found: dict[str, Any] = {}
    for name, value in values.items():
        if placed(name) == "result":
            found[name] = value
            if name in shown and shown[name] != value:  # the environment's: not itself, but whether it is another
                found[name] = f"{shown[name]} ({hashlib.sha256(repr(value).encode()).hexdigest()[:8]})"
    kl = config.algorithm.reference_kl
    if kl is not None and kl.estimator is KLEstimator.TOPK:  # its K stands nowhere else
        found["rollout.top_k_logprobs"] = config.rollout.top_k_logprobs
    normaliser = config.algorithm.normaliser or float(config.rollout.max_response_tokens)
    return found | {
        "algorithm.normaliser, resolved": normaliser,
        "model.path": f"{config.model.path} (weights {weights})",
        "task, its questions and answers": task,
    }


def check_changed(config: Config) -> None:
    """UserError for what `trainer.resume_changed` cannot name."""
    for name in config.trainer.resume_changed:
        named = f"trainer.resume_changed: {name}"
        if _in(KEPT, name):
            raise UserError(f"{named} is what a state is of; start a new run with model.path=RUN/hf")
        if name == "trainer.prompts_per_step" and config.rollout.schedule == "window":
            raise UserError(f"{named}: the groups that a window had begun are numbered by it; set it back")
        if not _in((*RESULT, *REMOVED, "task.data", "rollout.top_k_logprobs"), name):
            hint = did_you_mean(name, RESULT) or ": others may change without"
            raise UserError(f"{named} is no setting that a resumed run must have as it was{hint}")


def allowed(changed: str, named: Iterable[str]) -> bool:
    """Whether `trainer.resume_changed`, these names, lets a difference pass: of a setting, or of what one holds."""
    follows = _FOLLOWS.get(changed, ())
    return any(changed == one or changed.startswith(f"{one}.") or one.startswith(follows) for one in named)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The settings that are not what they were, each in words. Of a mapping (the preset's
    overrides) either side may have an entry that the other lacks. A setting that the schema did not know when the state
    was saved had its default's effect."""
    removed = {name: idle for name, (idle, _) in REMOVED.items()}
    gone = (  # FREE and REMOVED: as of an older version
        name for name in sorted(before.keys() - now.keys()) if not _in(FREE, name) and before[name] != removed.get(name)
    )
    found = {}
    for name in [*now, *gone]:
        section = name.rpartition(".")[0] + "."
        if name not in before and any(key.startswith(section) for key in before) and _is_default(name, now[name]):
            continue
        if _compared(name, before.get(name)) != _compared(name, now.get(name)):
            was, value = (repr(side[name]) if name in side else "absent" for side in (before, now))
            found[name] = f"{name} was {_short(was)} and is {_short(value)} now"
    return found


def _is_default(name: str, value: Any) -> bool:
    """Whether `value` is what the schema gives a dotted key that nobody sets."""
    sections: list[type[BaseModel]] = [Config]
    fields: list[FieldInfo] = []
    for part in name.split("."):
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        sections = [kind for field in fields for kind in sections_of(field.annotation)]
    return any(not field.is_required() and field.get_default(call_default_factory=True) == value for field in fields)


def placed(name: str) -> str:
    """`result` or `free`, for a dotted key of the configuration; KeyError where neither table has it."""
    for table, kind in ((RESULT, "result"), (FREE, "free")):
        if _in(table, name):
            return kind
    raise KeyError(f"{name}: place it in RESULT or FREE of {__name__}")


def _in(table: Iterable[str], name: str) -> bool:
    plain = re.sub(r"\.\d+(?=\.|$)", "", name)
    return any(plain == one or (one.endswith(".*") and f"{plain}.".startswith(one[:-1])) for one in table)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested sections; of a list of sections with their numbers."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            result |= flatten(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            result |= flatten({f"{name}.{number}": item for number, item in enumerate(value)})
        else:
            result[name] = value
    return result


def weights_fingerprint(folder: Path, *, random: bool) -> str:
    """Of the weights of a Hugging Face folder, however they are divided among files: name, shape and type of every
    tensor, and values from the middle of a thousand of them. A step of training changes some of those. Where weights
    are `random`, of its config.json."""
    digest = hashlib.sha256()
    if random:
        digest.update((folder / "config.json").read_bytes())
        return digest.hexdigest()[:16]
    files = HFFiles(folder)
    names = sorted(files.tensors)
    for name in names:
        stored = files.tensors[name]
        digest.update(json.dumps([name, stored.shape, str(stored.dtype)]).encode())
    some = [name for name in names if files.tensors[name].shape][:: max(1, -(-len(names) // _SAMPLED_TENSORS))]
    parts = {}
    for name in sorted(some, key=lambda name: str(files.tensors[name].file)):  # each file is opened once
        block = [(size // 2, size // 2 + 1) for size in files.tensors[name].shape]
        last = files.tensors[name].shape[-1]
        width = min(last, _SAMPLED_VALUES)
        block[-1] = ((last - width) // 2, (last - width) // 2 + width)
        parts[name] = files.read(name, tuple(block)).flatten().view(torch.uint8).numpy().tobytes()
    files.close()
    for name in sorted(parts):
        digest.update(parts[name])
    return digest.hexdigest()[:16]


def _compared(name: str, value: Any) -> Any:
    """Of the model, where it is does not count. States of before have an adapter's path as it was given."""
    if name == "lora.adapter" and value:
        return Path(value).absolute()
    match = re.fullmatch(r".*( \(weights [0-9a-f]{16}\))", value) if isinstance(value, str) else None
    return match[1] if match else value


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
