"""A Hugging Face `config.json`, checked field by field and reduced to what the Megatron-Core model is built from."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.engine_fields import refuse_engine_fields
from megatron_dppo.models.family import Family, families
from megatron_dppo.models.names import Shape, Transform, Vocabulary
from megatron_dppo.models.rope import check_rope

_log = logging.getLogger(__name__)

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this (and of the tensor-parallel size, where that is no divisor of it)."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _words(
    """
        model_type architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        intermediate_size vocab_size tie_word_embeddings rms_norm_eps max_position_embeddings hidden_act
        rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings
        use_sliding_window sliding_window max_window_layers layer_types
    """
)
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "is_encoder_decoder": False,
    "is_causal": True,
}
_LOADER = ("quantization_config", "per_layer_config", "text_config")
"""What transformers reads whatever the class: a model with one of them is another model."""
_READ_MOE = _words(
    """
        num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
        mlp_only_layers
    """
)
# transformers reads these: names, files, generation and training settings; none of them changes the forward pass
_WITHOUT_EFFECT = _words(
    """
        transformers_version dtype torch_dtype initializer_range use_cache bos_token_id eos_token_id pad_token_id
        output_router_logits router_aux_loss_coef return_dict output_attentions output_hidden_states id2label label2id
        problem_type _attn_implementation attn_implementation chunk_size_feed_forward pretraining_tp
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
    ignored: tuple[str, ...] = ()
    """Fields of config.json that transformers' class for the model type does not read."""

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
        makes of it, as the engine reads it (`llama3` states the scaled length)."""
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
    if (quantized := folder / "hf_quant_config.json").exists():
        raise UserError(f"{quantized}: quantized models are not supported; remove it if the weights are not quantized")
    model = resolve_hf_config(read_json_object(file), path=folder)
    if "auto_map" in model.ignored:
        _say_code_is_not_run(file, model.family.architecture)
    return model


@cache
def _say_code_is_not_run(file: Path, architecture: str) -> None:
    _log.warning("%s: auto_map names code, which is not run: the model is transformers' own %s", file, architecture)


def resolve_hf_config(raw: dict[str, Any], path: Path | None = None) -> HFConfig:
    """`load_hf_config` of the content of a config.json.

    transformers' own class for the model type is the reference. A field that it does not read cannot change the
    mathematics and is left out (`ignored`); one that it reads is read here too, or has to be at its neutral value. All
    is decided by the configuration that transformers resolves: defaults are in force where a field is absent.
    """
    where = f"{path}/config.json" if path else "model config"
    known = families()
    kind = raw.get("model_type")
    family = known.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UserError(f"{where}: model_type {kind!r} is not supported; there are {sorted(known)}")
    architectures = raw.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise UserError(f"{where}: architectures is {architectures}, only {family.architecture} is supported")
    refuse_absurd_sizes(raw, where)
    for name in _LOADER:
        if raw.get(name):
            raise UserError(f"{where}: {name} is set, which is not supported")
    raw = {name: value for name, value in raw.items() if name not in _LOADER}
    ours = _READ | _WITHOUT_EFFECT | set(_FIXED) | set(family.fixed) | (_READ_MOE if family.moe else set())
    ignored = tuple(name for name in raw if name not in ours and not _transformers_reads(family.model_type, name))
    try:
        # a copy: transformers writes into nested settings
        settings = copy.deepcopy({k: v for k, v in raw.items() if k != "model_type" and k not in ignored})
        config = AutoConfig.for_model(family.model_type, **settings)
        usual = type(config)()
    except Exception as error:  # transformers validates with several exception types of its own
        raise UserError(f"{where}: {' '.join(str(error).split())}") from None
    for name in settings:
        if name not in ours and raw[name] != getattr(usual, name, None):
            raise UserError(
                f"{where}: {name} is {raw[name]!r}, which transformers' {family.architecture} reads and this "
                "model does not support; remove it if it does not change the mathematics"
            )
    _check_values(config, family, where)
    refuse_engine_fields(raw, config, where)

    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
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
        ignored=ignored,
    )


@cache
def _sources(model_type: str) -> str:
    """transformers' code of the model type and of what it hands its configuration to."""
    config_class = type(AutoConfig.for_model(model_type))
    names = [config_class.__module__, config_class.__module__.replace(".configuration_", ".modeling_")]
    names += [f"{transformers.__name__}.{name}" for name in ("masking_utils", "modeling_rope_utils", "cache_utils")]
    return "\n".join(inspect.getsource(importlib.import_module(name)) for name in names)


@cache
def _transformers_reads(model_type: str, name: str) -> bool:
    """Whether the code names a field, as an attribute or as a string."""
    field = re.escape(name)
    return re.search(rf"""\b(config|self)\.{field}\b|["']{field}["']""", _sources(model_type)) is not None


def _check_values(config: PreTrainedConfig, family: Family, where: str) -> None:
    """What transformers resolved: numbers that are some, no value but the supported one, no sliding window."""
    for name, neutral in (_FIXED | dict(family.fixed)).items():
        value = getattr(config, name, neutral)
        if value != neutral and (value or neutral):
            raise UserError(f"{where}: {name} is {value!r}, only {neutral!r} is supported")
    sizes = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
    sizes += ["vocab_size", "max_position_embeddings"]
    if family.moe and config.num_experts:
        sizes += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"]
    for name in sizes:
        value = getattr(config, name, None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{where}: {name} is {value!r}, it must be a whole number above 0")
    head_dim, eps = getattr(config, "head_dim", None), config.rms_norm_eps
    if head_dim is not None and (isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 2):
        raise UserError(f"{where}: head_dim is {head_dim!r}, it must be a whole number above 1")
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise UserError(f"{where}: rms_norm_eps is {eps!r}, it must be a number from 0 on")
    kinds = getattr(config, "layer_types", None)
    if set(kinds or []) - {"full_attention"}:
        cause = "use_sliding_window is true and so " if getattr(config, "sliding_window", None) else ""
        raise UserError(
            f"{where}: {cause}layer_types has {sorted(set(kinds or []) - {'full_attention'})}, only full_attention is "
            "supported"
        )
    if not kinds and getattr(config, "sliding_window", None) is not None:
        flag = "use_sliding_window is true" if getattr(config, "use_sliding_window", False) else "sliding_window is set"
        raise UserError(
            f"{where}: {flag}: attention would reach back {config.sliding_window} tokens only; sliding-window "
            "attention is not supported"
        )
    check_rope(config, where)


def refuse_absurd_sizes(raw: dict[str, Any], where: str) -> None:
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
