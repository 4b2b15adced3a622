"""A folder that Megatron-LM and Megatron-Bridge load, from a sharded model; and what such folders say of theirs."""

from __future__ import annotations

import queue
import secrets
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.checkpoint.atomic import INCOMPLETE, check_target, publish, sync, write_synced
from megatron_dppo.checkpoint.first_rank import on_first_rank
from megatron_dppo.checkpoint.megatron_files import COMMON, FUSED, LESS_ONE, MARKER, RELEASE, MegatronFiles
from megatron_dppo.errors import UserError, file_errors, of_file
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import unwrap

RUN_CONFIG = "run_config.yaml"
_ARGUMENTS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_query_groups",
    "kv_channels": "kv_channels",
    "normalization": "normalization",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "gated_linear_unit": "swiglu",
    "qk_layernorm": "qk_layernorm",
    "add_bias_linear": "add_bias_linear",
    "add_qkv_bias": "add_qkv_bias",
    "num_moe_experts": "num_experts",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_router_topk": "moe_router_topk",
    "moe_router_pre_softmax": "moe_router_pre_softmax",
    "moe_layer_freq": "moe_layer_freq",
    "moe_router_score_function": "moe_router_score_function",
    "moe_router_enable_expert_bias": "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor": "moe_router_topk_scaling_factor",
    "moe_router_num_groups": "moe_router_num_groups",
    "moe_router_group_topk": "moe_router_group_topk",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
_SAME = (
    *("moe_shared_expert_gate", "attention_output_gate", "softmax_type"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
)
_ARGUMENTS |= {name: name for name in _SAME}
"""Fields of `TransformerConfig` that the weights are for, with Megatron-LM's arguments for them."""
_WINDOWS = ("window_size", "window_attn_skip_freq")
_ARGUMENTS |= {name: name for name in _WINDOWS}
_SHAPES = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_layer_freq")
"""Of these the tensors tell; a model without such layers may say anything."""
_EXTRA = "_extra_state"
_TE_MODULES = (
    "input_layernorm",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.out_norm",
    "pre_mlp_layernorm",
)


def save_megatron_checkpoint(
    output: Path,
    models: Sequence[torch.nn.Module],
    model: HFConfig,
    groups: ProcessGroupCollection,
    *,
    overwrite: bool = False,
) -> None:
    """Write the weights as `output/release`, with the marker that names it: Megatron-LM then starts from them without
    asking for an optimizer. Any layout can load it, and `--use-checkpoint-args` finds the model's arguments.

    Layers are numbered in names (`non_homogeneous_layers`), as the content metadata says to who loads it. Collective;
    each rank writes what it holds. The folder appears whole or not at all.
    """
    config: TransformerConfig = unwrap(models[0]).config
    partial = on_first_rank(lambda: _partial(output, overwrite))
    # The loader asks for a tensor's form as the content metadata describes it
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "non_homogeneous_layers": True}
    common = {
        "args": arguments(model, config),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
    }
    state: dict[str, Any] = dict(common)
    for number, chunk in enumerate(models):
        gpt = unwrap(chunk)
        weights = gpt.sharded_state_dict(metadata={**content, "dp_cp_group": groups.dp_cp})
        _add_extra_states(weights, gpt)
        _as_megatron_lm(weights, latent=model.latent is not None)
        _halves_apart(weights)
        state["model" if len(models) == 1 else f"model{number}"] = weights
    # Where the writer, a thread of this process, says what it wrote. The stock queue is a process of its own.
    filesystem_async._results_queue = queue.Queue()
    try:
        dist_checkpointing.save(
            state, str(partial / RELEASE), TorchDistSaveShardedStrategy(), content_metadata=dict(content)
        )
    except (CheckpointException, CheckpointingException, OSError) as error:
        on_first_rank(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise of_file(error, f"cannot write {output}: {error!r:.300}; nothing was left there") from None
    on_first_rank(lambda: _finish(partial, output, {**common, "content_metadata": content}))


def _partial(output: Path, overwrite: bool) -> Path:
    check_target(output, overwrite=overwrite)
    partial = output.parent / f".{output.name}{INCOMPLETE}{secrets.token_hex(4)}"
    with file_errors(f"cannot create {output}", "choose another output"):
        (partial / RELEASE).mkdir(parents=True)
    return partial


def _finish(partial: Path, output: Path, common: dict[str, Any]) -> None:
    try:
        torch.save(common, partial / RELEASE / COMMON)  # where older versions of Megatron-Core look for it
        write_synced(partial / MARKER, RELEASE)
        sync(partial / RELEASE)
        sync(partial)
        publish(partial, output)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise of_file(error, f"cannot write {output}: {error.strerror or error}; nothing was left there") from None


def _as_megatron_lm(weights: dict[str, Any], *, latent: bool) -> None:
    """Give norms of latents the names that they have with TransformerEngine, in the product after them, and `LESS_ONE`
    Megatron-LM's numbers, in float64, from which a weight comes back to the bit but for one next to 0: in float32 from
    2^-29 on, in bfloat16 from 2^-45, others to within 2^-53."""
    for entry in weights.values():
        layer, inside, name = entry.key.partition("self_attention.")
        if entry.key.endswith(LESS_ONE):
            entry.data = entry.data.detach().double() - 1
            entry.dtype = entry.data.dtype
        elif latent and (fused := FUSED.get(inside + name)):
            entry.key = layer + fused[0]


def _halves_apart(weights: dict[str, Any]) -> None:
    """The writer copies what is a view, and keeps all copies: both halves of every gated matrix, two thirds of an MoE
    model. Here each half is a storage of its own in the matrix's memory. On a GPU it copies everything to the host."""
    for key, entry in weights.items():
        if isinstance(entry, ShardedTensorFactory) and entry.data.is_cpu:
            weights[key] = halves = entry.build()
            for half in halves:
                memory = half.data.detach().reshape(-1).view(torch.uint8).numpy()
                half.data = torch.from_numpy(memory).view(half.data.dtype).view(half.data.shape)


def _add_extra_states(weights: dict[str, Any], gpt: GPTModel) -> None:
    """TransformerEngine's modules ask for an extra state each, empty without 8-bit numbers; a model without them has
    none for its norms and attention."""
    present = {entry.key for entry in weights.values()}
    last = tuple(f".self_attention.{name}.{_EXTRA}" for name in ("linear_proj", "out_proj"))
    for entry in [e for e in weights.values() if e.key.endswith(last)]:
        layer = entry.key.partition("self_attention.")[0]
        keys = [f"{layer}{module}.{_EXTRA}" for module in _TE_MODULES]
        keys += [f"decoder.final_layernorm.{_EXTRA}"] if gpt.post_process else []
        for key in keys:
            if key not in present:
                present.add(key)
                weights[key] = ShardedObject(key, None, (1,), (0,), entry.replica_id)


def arguments(model: HFConfig, config: TransformerConfig) -> Namespace:
    """Megatron-LM's arguments of a model."""
    found = {theirs: getattr(config, ours, None) for ours, theirs in _ARGUMENTS.items()}
    found |= {"multi_latent_attention": model.latent is not None, "qk_layernorm": _has_qk_norms(model, config)}
    if model.moe is None:
        found |= {"num_experts": None, "moe_ffn_hidden_size": None, "moe_layer_freq": 1}
    return Namespace(
        **found,
        group_query_attention=config.num_query_groups != config.num_attention_heads,
        untie_embeddings_and_output_weights=not model.tied,
        position_embedding_type="rope",
        add_position_embedding=True,
        rotary_base=rotary_base(model),
        rotary_percent=model.rotary_factor,
        moe_router_bias_update_rate=config.moe_router_bias_update_rate,
        max_position_embeddings=model.max_position_embeddings,
        seq_length=model.max_position_embeddings,
        padded_vocab_size=model.padded_vocab_size(config.tensor_model_parallel_size),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        ckpt_format="torch_dist",
        no_save_optim=True,
        no_save_rng=True,
    )


def _has_qk_norms(model: HFConfig, config: TransformerConfig) -> bool:
    """In Megatron-LM's words: those of latents are some."""
    return config.qk_layernorm or model.latent is not None


def rope_parameters(model: HFConfig) -> dict[str, Any]:
    return dict(model.config.rope_parameters or {})


def rotary_base(model: HFConfig) -> float:
    return float(rope_parameters(model).get("rope_theta", 10000.0))


def check_same_model(files: MegatronFiles, model: HFConfig, config: TransformerConfig) -> None:
    """`UserError` where the arguments in a folder, or Megatron-Bridge's configuration, are of another model than
    `config` (the tensors' shapes do not tell the number of heads or of chosen experts)."""
    said = files.common().get("args")
    stated: Mapping[str, Any] = vars(said) if isinstance(said, Namespace) else {}
    if stated and not stated.get("group_query_attention", True):
        stated = {**stated, "num_query_groups": stated.get("num_attention_heads")}
    names = _ARGUMENTS
    run_config = files.folder / RUN_CONFIG
    if run_config.is_file():
        stated, names = _bridge_model(run_config), {ours: ours for ours in _ARGUMENTS}
    left_out = {*_SHAPES, *_WINDOWS}  # a pattern of windows may be written in several ways
    left_out |= {"kv_channels"} if model.latent else set()  # its keys have sizes of their own
    expected = {theirs: getattr(config, ours, None) for ours, theirs in names.items() if ours not in left_out}
    expected = {name: value for name, value in expected.items() if value is not None or name not in _SAME}
    expected["qk_layernorm"] = _has_qk_norms(model, config)
    if model.moe is None:
        expected = {name: value for name, value in expected.items() if "moe" not in name and "expert" not in name}
    expected |= {"rotary_base": rotary_base(model), "rotary_percent": model.rotary_factor}
    if stated.get("position_embedding_type") != rope_parameters(model).get("rope_type"):
        expected["position_embedding_type"] = "rope"  # by that or by the kind of its frequencies, yarn
    for name, value in expected.items():
        there = stated.get(name)
        if there is not None and there != value:
            raise UserError(
                f"{files.folder} is of another model than the config.json in {model.path}: {name} is {there!r} there, "
                f"{value!r} here"
            )


def _bridge_model(file: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(file.read_bytes())
    except (yaml.YAMLError, OSError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}; fetch it again") from None
    described = found.get("model") if isinstance(found, dict) else None
    return described if isinstance(described, dict) else {}
