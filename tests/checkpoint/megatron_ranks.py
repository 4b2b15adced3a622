"""Checkpoints as Megatron-LM writes and reads them: stock models, parameters cut by hand, `dist_checkpointing`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file

from megatron_dppo.checkpoint.convert_arguments import run_convert
from megatron_dppo.compat import megatron_cpu
from megatron_dppo.compat.packed_attention import local_block_spec
from megatron_dppo.errors import UserError
from megatron_dppo.models.layers.gated_delta import HeadRMSNorm
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig
from tests.megatron import build_from

Layout = tuple[int, int, int, int]
STOCK_NORM, FUSED_NORM = "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"


class Whole:
    """A Hugging Face folder and the parameters of the whole model that it makes, by Megatron-Core's local names."""

    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.hf = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
        self.layers, self.heads = self.config["num_hidden_layers"], self.config["num_attention_heads"]
        self.groups = self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        self.experts = self.config.get("num_experts") or self.config.get("num_local_experts") or 0
        self.expert_size = self.config.get("moe_intermediate_size", self.config["intermediate_size"])
        self.tied = self.config["tie_word_embeddings"]

    def vocabulary(self, name: str, rows: int) -> torch.Tensor:
        return F.pad(self.hf[name], (0, 0, 0, rows - len(self.hf[name])), value=7.0)

    def qkv(self, layer: int, kind: str) -> torch.Tensor:
        parts = [self.hf[f"model.layers.{layer}.self_attn.{p}_proj.{kind}"] for p in "qkv"]
        by_group = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def mlp(self, layer: int, expert: int | None, part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second matrix of one rank."""
        where, names = f"model.layers.{layer}.mlp.", ("gate_proj", "up_proj", "down_proj")
        if expert is not None:
            where += f"experts.{expert}."
            if self.config["model_type"] == "mixtral":
                where, names = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2")
        gate, up, down = (self.hf[f"{where}{name}.weight"] for name in names)
        first = torch.cat([gate.chunk(parts)[part], up.chunk(parts)[part]])
        return first, down.chunk(parts, dim=1)[part]

    def shard(self, name: str, layer: int, first_expert: int, rows: int) -> torch.Tensor:
        """A parameter of this rank, by its name inside the layer or the model."""
        tp, parts = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        here = f"model.layers.{layer}."
        moe = "block_sparse_moe" if self.config["model_type"] == "mixtral" else "mlp"
        if ".local_experts." in name:
            expert = first_expert + int(name.split(".")[3])
            et = parallel_state.get_expert_tensor_parallel_rank()
            both = self.mlp(layer, expert, et, parallel_state.get_expert_tensor_parallel_world_size())
            return both["linear_fc2" in name]
        match name:
            case "embedding.word_embeddings.weight":
                return self.vocabulary("model.embed_tokens.weight", rows).chunk(parts)[tp]
            case "output_layer.weight":
                source = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
                return self.vocabulary(source, rows).chunk(parts)[tp]
            case "decoder.final_layernorm.weight":
                return self.hf["model.norm.weight"]
            case "input_layernorm.weight":
                return self.hf[here + "input_layernorm.weight"]
            case "pre_mlp_layernorm.weight":
                return self.hf[here + "post_attention_layernorm.weight"]
            case "self_attention.linear_qkv.weight" | "self_attention.linear_qkv.bias":
                return self.qkv(layer, name.rpartition(".")[2]).chunk(parts)[tp]
            case "self_attention.linear_proj.weight":
                return self.hf[here + "self_attn.o_proj.weight"].chunk(parts, dim=1)[tp]
            case "self_attention.q_layernorm.weight" | "self_attention.k_layernorm.weight":
                return self.hf[here + f"self_attn.{name.split('.')[1][0]}_norm.weight"]
            case "mlp.router.weight":
                return self.hf[here + f"{moe}.gate.weight"]
            case "mlp.linear_fc1.weight" | "mlp.linear_fc2.weight":
                return self.mlp(layer, None, tp, parts)["linear_fc2" in name]
        raise AssertionError(name)


def stock_model(whole: Whole, layout: Layout, padded: int, *, numbered: bool) -> GPTModel:
    """`layout`: tensor, pipeline, expert and expert tensor parallel.

    `numbered`: the pattern of MoE layers is given as a list, so that layers have numbers in a checkpoint."""
    tp, pp, ep, etp = layout
    megatron_cpu.install()
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    moe: dict[str, Any] = {}
    if whole.experts:
        moe = {
            "num_moe_experts": whole.experts,
            "moe_ffn_hidden_size": whole.expert_size,
            "moe_router_topk": whole.config["num_experts_per_tok"],
            "moe_layer_freq": [1] * whole.layers if numbered else 1,
        }
    config = TransformerConfig(
        num_layers=whole.layers,
        hidden_size=whole.config["hidden_size"],
        num_attention_heads=whole.heads,
        num_query_groups=whole.groups,
        kv_channels=whole.head_dim,
        ffn_hidden_size=whole.config["intermediate_size"],
        qk_layernorm="model.layers.0.self_attn.q_norm.weight" in whole.hf,
        add_qkv_bias="model.layers.0.self_attn.q_proj.bias" in whole.hf,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        transformer_impl="local",
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **moe,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm"),
        vocab_size=padded,
        max_sequence_length=512,
        pre_process=stage == 0,
        post_process=stage == pp - 1,
        share_embeddings_and_output_weights=whole.tied,
        position_embedding_type="rope",
    )


def named_shards(model: GPTModel, whole: Whole, padded: int) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, str]]:
    """Every parameter of this rank with what belongs there."""
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    local_experts = whole.experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = local_experts * parallel_state.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        layer, rest = 0, name
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            layer = numbers[int(number)]
        yield parameter, whole.shard(rest, layer, first_expert, padded), name


def metadata(singleton: bool) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"singleton_local_shards": singleton, "chained_optim_avoid_prefix": True, "dp_cp_group": group}


@torch.no_grad()
def write_stock(
    rank: int,
    path: Path,
    root: Path,
    layout: Layout,
    *,
    padded: int = 384,
    numbered: bool = False,
    singleton: bool = False,
    te_names: bool = False,
    optimizer: bool = False,
    **arguments: Any,
) -> None:
    """Save what Megatron-LM would as iteration 100 of a run: model, arguments, and an optimizer's moments."""
    whole = Whole(path)
    model = stock_model(whole, layout, padded, numbered=numbered)
    for parameter, value, _ in named_shards(model, whole, padded):
        parameter.copy_(value)
    content = metadata(singleton)
    weights = model.sharded_state_dict(metadata=content)
    if te_names:
        for entry in weights.values():
            entry.key = entry.key.replace(FUSED_NORM, STOCK_NORM)
    said = {"num_layers": whole.layers, "num_attention_heads": whole.heads, "params_dtype": torch.float32}
    state: dict[str, Any] = {
        "args": Namespace(**(said | arguments)),
        "checkpoint_version": 3.0,
        "iteration": 100,
        "model": weights,
    }
    if optimizer:
        state["optimizer"] = {
            name: ShardedTensor.from_rank_offsets(
                f"optimizer.state.exp_avg.{name}", torch.zeros(4), replica_id=rank, prepend_axis_num=0
            )
            for name in ("embedding.word_embeddings.weight",)
        }
    folder = root / "iter_0000100"
    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), TorchDistSaveShardedStrategy(), content_metadata=content)
    if rank == 0:
        (root / "latest_checkpointed_iteration.txt").write_text("100")


def read_stock(rank: int, path: Path, root: Path, layout: Layout, padded: int = 384) -> int:
    """Load what was written here, as Megatron-LM does; how many parameters are equal to the bit (any other raises)."""
    whole = Whole(path)
    model = stock_model(whole, layout, padded, numbered=False)
    folder = root / "release"
    common = dist_checkpointing.load_common_state_dict(str(folder))
    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    weights = model.sharded_state_dict(metadata={**content, "dp_cp_group": group})
    for entry in weights.values():
        if whole.experts:  # the stock spec without TransformerEngine calls this norm as that of a dense MLP
            entry.key = entry.key.replace(FUSED_NORM, STOCK_NORM)
    loaded = dist_checkpointing.load({"model": weights}, str(folder))
    model.load_state_dict(loaded["model"])
    equal = 0
    for parameter, value, name in named_shards(model, whole, padded):
        if "embedding" in name or "output_layer" in name:  # what padding holds is nobody's
            rows = max(
                0,
                min(
                    len(value),
                    whole.config["vocab_size"] - len(value) * parallel_state.get_tensor_model_parallel_rank(),
                ),
            )
            parameter, value = parameter[:rows], value[:rows]
        assert torch.equal(parameter, value), name
        equal += 1
    return equal


def read_plain(rank: int, path: Path, root: Path, layout: dict[str, Any]) -> int:
    """Load what was written here into plain Megatron-Core modules of a kind that `stock_model` has not, by the names
    that its layers have with TransformerEngine; how many parameters are what this project's model has (any other
    raises)."""
    ours, model, groups = build_from(path, layout)
    config = transformer_config(model, ParallelConfig(**layout))
    config.qk_layernorm = config.qk_layernorm or model.latent is not None
    spec = local_block_spec(config, pp_rank=groups.pp.rank())
    first = groups.pp.rank() * model.layers // groups.pp.size()
    for number, layer in enumerate(spec.layer_specs, first):
        attention = layer.submodules.self_attention
        if model.latent:
            attention.submodules.q_layernorm = attention.submodules.kv_layernorm = spec.layer_norm
        if model.is_delta_layer(number):
            parts = GatedDeltaNetSubmodules(ColumnParallelLinear, HeadRMSNorm, RowParallelLinear)
            layer.submodules.self_attention = ModuleSpec(GatedDeltaNet, submodules=parts)
            layer.submodules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    stock = GPTModel(
        config,
        spec,
        vocab_size=model.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=512,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    folder = root / "release"
    content = dist_checkpointing.load_content_metadata(
        preloaded_state_dict=dist_checkpointing.load_common_state_dict(str(folder))
    )
    weights = stock.sharded_state_dict(metadata={**content, "dp_cp_group": groups.dp_cp})
    for entry in weights.values():
        for name, fused in (("q_layernorm.", "linear_q_up_proj"), ("kv_layernorm.", "linear_kv_up_proj")):
            if model.latent:
                entry.key = entry.key.replace(name, f"{fused}.layer_norm_")
    loaded = dist_checkpointing.load({"model": weights}, str(folder))
    stock.load_state_dict(loaded["model"])
    found, equal = dict(stock.named_parameters()), 0
    for name, value in ours[0].named_parameters():
        less = 1 if "out_norm" in name else 0
        assert torch.equal(found.pop(name), value - less), name
        equal += 1
    assert not found
    return equal


def convert(rank: int, *arguments: object) -> str:
    """The command; what it refuses with."""
    from tests.checkpoint.test_convert import parsed

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    try:
        run_convert(parsed(*arguments))
    except UserError as error:
        return str(error)
    return ""


def there_and_back(rank: int, path: Path, root: Path, there: list[str], back: list[str]) -> list[str]:
    """Hugging Face to Megatron-LM in one layout, and back in another."""
    return [
        convert(rank, path, root / "megatron", "--to", "megatron-lm", *there),
        convert(rank, root / "megatron", root / "back", "--base", path, *back),
    ]
