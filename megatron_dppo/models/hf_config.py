"""A Hugging Face `config.json`, checked field by field and reduced to what the Megatron-Core model is built from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.family import Family, families
from megatron_dppo.models.names import Shape, Transform, Vocabulary

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this (and of the tensor-parallel size, where that is no divisor of it)."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _words(
    """
        model_type architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        intermediate_size vocab_size tie_word_embeddings rms_norm_eps max_position_embeddings hidden_act
        rope_theta rope_scaling rope_parameters use_sliding_window sliding_window max_window_layers layer_types
    """
)
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "use_mrope": False,
}
_READ_MOE = _words(
    """
        num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
        mlp_only_layers
    """
)
# names, files, generation and training settings: none of them changes the forward pass
_WITHOUT_EFFECT = _words(
    """
        _name_or_path transformers_version dtype torch_dtype initializer_range use_cache bos_token_id eos_token_id
        pad_token_id sep_token_id decoder_start_token_id output_router_logits router_aux_loss_coef torchscript
        return_dict output_attentions output_hidden_states use_bfloat16 id2label label2id problem_type
        finetuning_task task_specific_params tokenizer_class prefix
        _attn_implementation attn_implementation _attn_implementation_autoset chunk_size_feed_forward
        keys_to_ignore_at_inference temperature top_k top_p do_sample max_length min_length
        repetition_penalty num_return_sequences unsloth_version unsloth_fixed
    """
)
_LARGEST = {
    "num_hidden_layers": 2**10,
    "hidden_size": 2**20,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "intermediate_size": 2**24,
    "vocab_size": 2**26,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "moe_intermediate_size": 2**24,
    "max_position_embeddings": 2**40,
}
_MOST_EXPERTS = 2**18
"""In all layers together."""


@dataclass(frozen=True)
class MoE:
    """Mixture-of-experts layers: softmax over `experts` logits, the `topk` likeliest run."""

    experts: int
    topk: int
    intermediate_size: int
    normalise: bool
    """The weights of the chosen experts are divided by their sum."""
    layers: tuple[bool, ...]
    """Per layer: mixture of experts (True) or one dense MLP."""


@dataclass(frozen=True)
class HFConfig:
    """The model behind a `config.json`. Sizes are of the whole model, never of a shard."""

    family: Family
    path: Path | None
    """Folder of the checkpoint; None for a config without files."""
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    """Output layer and embedding are one matrix."""
    rms_norm_eps: float
    max_position_embeddings: int
    moe: MoE | None
    config: PreTrainedConfig
    """The same as transformers has it (rotary scaling, generation settings, saving)."""

    @cached_property
    def dims(self) -> dict[str, int]:
        """Sizes by the names that tables use."""
        sizes = {
            "hidden": self.hidden_size,
            "head_dim": self.head_dim,
            "query": self.heads * self.head_dim,
            "ffn": self.intermediate_size,
        }
        if self.moe:
            sizes |= {"experts": self.moe.experts, "moe_ffn": self.moe.intermediate_size}
        return sizes

    @property
    def positions(self) -> int:
        """Tokens that a sequence may reach: `max_position_embeddings`, or what the scaling of the rotary positions
        makes of it, as the engine reads it (`llama3` states the scaled length, `dynamic` is not trained beyond)."""
        rope = dict(self.config.rope_parameters or {})
        kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
        if kind == "yarn":
            return int(rope.get("original_max_position_embeddings", self.max_position_embeddings) * factor)
        return int(self.max_position_embeddings * (factor if kind == "linear" else 1.0))

    @property
    def has_dense_layers(self) -> bool:
        return self.moe is None or not all(self.moe.layers)

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """Rows of the embedding over all ranks: the least multiple of 128 and of `tensor_parallel`, so that checkpoints
        of different tensor-parallel sizes agree on it wherever it divides 128."""
        multiple = math.lcm(VOCAB_MULTIPLE, tensor_parallel)
        return -(-self.vocab_size // multiple) * multiple

    def parameters(self) -> Iterator[tuple[str, Transform]]:
        """Every parameter of the whole model with its transform, in model order, `{layer}` and `{expert}` filled in.

        A tied output layer is listed too (pipeline parallelism gives the last stage a copy); its source is the
        embedding."""
        table = self.family.table
        for name in ("embedding.word_embeddings.weight",):
            yield name, table[name]
        for layer in range(self.layers):
            for name, transform in table.items():
                if not name.startswith("decoder.layers.") or self._absent(name, layer):
                    continue
                if "{expert}" not in name:
                    yield name.format(layer=layer), transform.at(layer=layer)
            if self.is_moe_layer(layer):
                assert self.moe is not None
                for expert in range(self.moe.experts):
                    for name, transform in table.items():
                        if "{expert}" in name:
                            yield name.format(layer=layer, expert=expert), transform.at(layer=layer, expert=expert)
        yield "decoder.final_layernorm.weight", table["decoder.final_layernorm.weight"]
        output = table["embedding.word_embeddings.weight"] if self.tied else table["output_layer.weight"]
        assert isinstance(output, Vocabulary)
        yield "output_layer.weight", output

    def _absent(self, name: str, layer: int) -> bool:
        """Dense MLP entries in expert layers and the reverse."""
        is_moe_entry = ".mlp.router." in name or ".mlp.experts." in name
        is_dense_entry = ".mlp.linear_" in name
        return is_dense_entry if self.is_moe_layer(layer) else is_moe_entry

    @cached_property
    def tensors(self) -> dict[str, Shape]:
        """Every Hugging Face tensor of the model with its shape, in model order."""
        shapes: dict[str, Shape] = {}
        for _, transform in self.parameters():
            shapes |= transform.sources(self)
        return shapes


def load_hf_config(path: str | Path) -> HFConfig:
    """Read and check `path/config.json`; `UserError` names the file and the field that is missing or unsupported."""
    folder = Path(path)
    file = folder / "config.json"
    if not folder.is_dir():
        raise UserError(f"model folder {folder} does not exist")
    if not file.is_file():
        raise UserError(f"{folder} is no Hugging Face model: it has no config.json")
    return resolve_hf_config(read_json_object(file), path=folder)


def resolve_hf_config(raw: dict[str, Any], path: Path | None = None) -> HFConfig:
    """`load_hf_config` of the content of a config.json."""
    where = f"{path}/config.json" if path else "model config"
    known = families()
    family = known.get(raw.get("model_type", ""))
    if family is None:
        raise UserError(f"{where}: model_type {raw.get('model_type')!r} is not supported; there are {sorted(known)}")
    _refuse_unknown(raw, family, where)
    _refuse_absurd_sizes(raw, where)
    try:
        settings = {k: v for k, v in raw.items() if k != "model_type"}
        config = AutoConfig.for_model(family.model_type, **settings)
    except Exception as error:  # transformers validates with several exception types of its own
        raise UserError(f"{where}: {error}") from None

    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return HFConfig(
        family=family,
        path=path,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        moe=_moe(config, where) if family.moe else None,
        config=config,
    )


def _refuse_unknown(raw: dict[str, Any], family: Family, where: str) -> None:
    """Every field is either read, known to have no effect, or an error."""
    architectures = raw.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise UserError(f"{where}: architectures is {architectures}, only {family.architecture} is supported")
    read = _READ | (_READ_MOE if family.moe else frozenset()) | set(_FIXED) | set(family.fixed)
    unknown = sorted(set(raw) - read - _WITHOUT_EFFECT)
    if unknown:
        raise UserError(
            f"{where}: field {unknown[0]!r} is not known for model_type {family.model_type} and may change the "
            "mathematics; remove it if it does not" + (f" (also {', '.join(unknown[1:])})" if unknown[1:] else "")
        )
    fixed = {**_FIXED, **family.fixed}
    for name, value in fixed.items():
        if raw.get(name, value) != value:
            raise UserError(f"{where}: {name} is {raw[name]!r}, only {value!r} is supported")
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        raise UserError(f"{where}: use_sliding_window is true; sliding-window attention is not supported")
    kinds = set(raw.get("layer_types") or []) - {"full_attention"}
    if kinds:
        raise UserError(f"{where}: layer_types has {sorted(kinds)}, only full_attention is supported")


def _refuse_absurd_sizes(raw: dict[str, Any], where: str) -> None:
    """Sizes far beyond any model's, for which transformers and the table of tensors would take all memory."""
    for name, limit in _LARGEST.items():
        size = raw.get(name)
        if isinstance(size, int) and not size <= limit:
            raise UserError(f"{where}: {name} is {size:,}, more than {limit:,}, which no model has; correct it")
    layers, experts = raw.get("num_hidden_layers"), raw.get("num_experts") or raw.get("num_local_experts")
    if isinstance(layers, int) and isinstance(experts, int) and layers * experts > _MOST_EXPERTS:
        raise UserError(
            f"{where}: num_hidden_layers {layers:,} of {experts:,} experts are more than {_MOST_EXPERTS:,} experts, "
            "which no model has; correct one of them"
        )


def _moe(config: PreTrainedConfig, where: str) -> MoE | None:
    if not config.num_experts:
        return None
    dense = set(config.mlp_only_layers or [])
    layers = tuple(
        i not in dense and (i + 1) % config.decoder_sparse_step == 0 for i in range(config.num_hidden_layers)
    )
    if not any(layers):
        raise UserError(f"{where}: decoder_sparse_step and mlp_only_layers leave no expert layer; set num_experts to 0")
    if not 0 < config.num_experts_per_tok <= config.num_experts:
        raise UserError(
            f"{where}: num_experts_per_tok is {config.num_experts_per_tok}, with {config.num_experts} experts"
        )
    return MoE(
        experts=config.num_experts,
        topk=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalise=bool(config.norm_topk_prob),
        layers=layers,
    )
