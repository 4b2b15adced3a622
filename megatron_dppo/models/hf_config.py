"""The one place that reads a Hugging Face `config.json`: checked field by field, then given to its family."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.engine_fields import NEUTRAL, refuse_engine_fields, refuse_neutral
from megatron_dppo.models.families import decoder
from megatron_dppo.models.family import Family, families, text_fields
from megatron_dppo.models.field_kinds import refuse_kinds
from megatron_dppo.models.names import Buffer, Shape, Table, Transform, is_expert
from megatron_dppo.models.rope import check_rope
from megatron_dppo.models.stacked import Stacked
from megatron_dppo.router_replay.record import RouteSchema

_log = logging.getLogger(__name__)

_LOADER = ("quantization_config", "per_layer_config", "text_config")
"""What transformers reads whatever the class: a model with one of them is another model."""
# transformers reads these: names, files, generation and training settings; none of them changes the forward pass
_WITHOUT_EFFECT = decoder.words(
    """
        model_type architectures transformers_version dtype torch_dtype initializer_range use_cache bos_token_id
        eos_token_id pad_token_id output_router_logits router_aux_loss_coef return_dict output_attentions
        output_hidden_states id2label label2id problem_type _attn_implementation attn_implementation
        chunk_size_feed_forward pretraining_tp
    """
)
_GENERATION = frozenset(vars(GenerationConfig()))
"""What older files have of `generate`'s settings."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MOST_EXPERTS = 2**18
"""In all layers together."""


@dataclass(frozen=True, kw_only=True)
class HFConfig(Architecture):
    """The architecture behind a `config.json`, and the tensors of its checkpoint."""

    family: Family
    path: Path | None
    """Folder of the checkpoint; None for a config without files."""
    config: PreTrainedConfig
    """The same as transformers has it (rotary scaling, generation settings, saving)."""
    ignored: tuple[str, ...] = ()
    """Fields of config.json that transformers' class for the model type does not read."""

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
    def routes(self) -> RouteSchema | None:
        """What an engine records of the model's routers; None for a model without experts."""
        if self.moe is None:
            return None
        routing = tuple(layer for layer in range(self.layers) if self.is_moe_layer(layer))
        return RouteSchema(self.layers, routing, self.moe.experts, self.moe.topk)

    @cached_property
    def layer_tables(self) -> tuple[Table, ...]:
        """The family's table of each decoder layer."""
        return tuple(self.family.layer(self, layer) for layer in range(self.layers))

    @cached_property
    def active_parameters(self) -> int:
        """Weights that one token meets in matrix products: attention, router, its `topk` experts (or the dense MLP) in
        every layer, and the output layer. The embedding is looked up, and norms are vectors; neither counts."""
        total = self.vocab_size * self.hidden_size
        for table in self.layer_tables:
            for name, transform in table.items():
                if len(shape := transform.shape(self, 1)) > 1:
                    total += prod(shape) * (self.moe.topk if self.moe and is_expert(name) else 1)
        return total

    def parameters(self, *, stacked: bool = False) -> Iterator[tuple[str, Transform]]:
        """Every parameter of the whole model with its transform, in model order, `{layer}` and `{expert}` filled in.
        `stacked`: where the checkpoint holds all experts of a layer in one tensor.

        A tied output layer is listed too (pipeline parallelism gives the last stage a copy); its source is the
        embedding."""
        ends = dict(self.family.ends)
        if self.tied:
            ends["output_layer.weight"] = ends["embedding.word_embeddings.weight"]
        yield "embedding.word_embeddings.weight", ends.pop("embedding.word_embeddings.weight")
        experts = self.moe.experts if self.moe else 0
        for layer, single in enumerate(self.layer_tables):
            table = self._with_stacks(single) if stacked else single
            for name, transform in table.items():
                if not is_expert(name):
                    yield name.format(layer=layer), transform.at(layer=layer)
            of_expert = {name: transform for name, transform in table.items() if is_expert(name)}
            for expert in range(experts) if of_expert else ():
                for name, transform in of_expert.items():
                    yield name.format(layer=layer, expert=expert), transform.at(layer=layer, expert=expert)
        yield from ends.items()

    def _with_stacks(self, table: Table) -> Table:
        result = dict(table)
        for name, tensor in self.family.stacked.items():
            if (one := table.get(name)) is not None:
                result[name] = Stacked(tensor, one) if is_expert(name) else replace(one, name=tensor)  # type: ignore[type-var]
        return result

    @cached_property
    def tensors(self) -> dict[str, Shape]:
        """Every Hugging Face tensor of the model with its shape, in model order."""
        return self._sources(stacked=False)

    @cached_property
    def stacked_tensors(self) -> dict[str, Shape]:
        """The same where all experts of a layer are in one; empty where the family knows no such checkpoint."""
        return self._sources(stacked=True) if self.moe and self.family.stacked else {}

    @cached_property
    def written_in(self) -> dict[str, str]:
        """Of checkpoints that are written here with stacks of experts: the stack that a matrix of one expert is in, by
        its name. A stack is its matrices one after another."""
        if not self.family.writes_stacked:
            return {}
        stacks = {name: t.name for name, t in self.parameters(stacked=True) if isinstance(t, Stacked)}
        single = dict(self.parameters())
        return {tensor: stack for name, stack in stacks.items() for tensor in single[name].sources(self)}

    @cached_property
    def float32_tensors(self) -> frozenset[str]:
        """Tensors that stay float32 whatever the type of the weights."""
        return frozenset(name for _, t in self.parameters() if isinstance(t, Buffer) for name in t.sources(self))

    def carries(self, tensor: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no place for it: one of a layer after the
        last (`mtp_layers`), or one that the family names (`carried`)."""
        layer = _LAYER.match(tensor)
        further = layer is not None and self.layers <= int(layer[1]) < self.layers + self.mtp_layers
        return further or tensor.startswith(self.family.carried)

    def _sources(self, *, stacked: bool) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for _, transform in self.parameters(stacked=stacked):
            shapes |= transform.sources(self)
        return shapes


def load_hf_config(path: str | Path) -> HFConfig:
    """Read and check `path/config.json`; `UserError` names the file and the field that is missing or unsupported."""
    folder = Path(path)
    file = folder / "config.json"
    if not folder.is_dir():
        wrong = "is a file" if folder.is_file() else "does not exist"
        raise UserError(
            f"model folder {folder} {wrong}; point model.path to a Hugging Face folder (`hf download NAME "
            "--local-dir FOLDER` makes one of a model of the hub)"
        )
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
    family = family_of(raw)
    if family is None:
        for whole in families().values():
            if whole.text_type and whole.text_type == raw.get("model_type"):
                raise UserError(
                    f"{where}: model_type {whole.text_type!r} is the text part of {whole.model_type} alone, for which "
                    f"vLLM has no class; use the folder of the whole {whole.architecture}"
                )
        raise UserError(
            f"{where}: model_type {raw.get('model_type')!r} is not supported; there are {sorted(families())}"
        )
    architectures = raw.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise UserError(f"{where}: architectures is {architectures}, only {family.architecture} is supported")
    if family.text_type:
        raw = _text_part(raw, family, where)
    for name in _LOADER:
        if raw.get(name):
            convert = "; `megatron-dppo convert` makes plain weights of those in 8 or 4 bits"
            hint = convert if name == "quantization_config" else ""
            raise UserError(f"{where}: {name} is set, which is not supported{hint}")
    for name, limit in decoder.LARGEST.items():
        # transformers and the table of tensors would take all memory
        if isinstance(size := raw.get(name), int) and not size <= limit:
            raise UserError(f"{where}: {name} is {size:,}, more than {limit:,}, which no model has; correct it")
    raw = {name: value for name, value in raw.items() if name not in _LOADER}
    fixed = decoder.FIXED | dict(family.fixed)
    ours = _WITHOUT_EFFECT | decoder.READS | family.reads | set(fixed)
    ignored = tuple(
        name
        for name in raw
        if name not in ours and (name in _GENERATION or not _transformers_reads(family.reference, name))
    )
    refuse_kinds(raw, ours, where)
    settings = {k: v for k, v in raw.items() if k != "model_type" and k not in ignored}
    try:
        config = _described(family, settings)
        usual = type(config)()
    except Exception as error:  # transformers validates with several exception types of its own
        at = next((name for name in settings if _is_at_fault(family, settings, name)), None)
        said = " ".join(str(error).split())
        raise UserError(f"{where}: {at}: {said}; correct {at}" if at else f"{where}: {said}") from None
    for other, name in usual.attribute_map.items():
        if other in raw and name in raw and raw[other] != raw[name]:
            raise UserError(
                f"{where}: {other} is {raw[other]!r} and {name} {raw[name]!r}, which are two names of one setting; "
                "remove the wrong one"
            )
    for name in settings:
        if name not in ours and raw[name] != getattr(usual, name, None):
            raise UserError(
                f"{where}: {name} is {raw[name]!r}, which transformers' {family.architecture} reads and this "
                "model does not support; remove it if it does not change the mathematics"
            )
    for name, neutral in fixed.items():
        value = getattr(config, name, neutral)
        if value is not None if neutral is None else value != neutral and (value or neutral):
            raise UserError(f"{where}: {name} is {value!r}, only {neutral!r} is supported")
    try:
        found = family.read(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    check_rope(config, where, found.rotary_factor)
    refuse_engine_fields(raw, config, family, where)
    if found.moe and found.layers * found.moe.experts > _MOST_EXPERTS:
        raise UserError(
            f"{where}: num_hidden_layers {found.layers:,} of {found.moe.experts:,} experts are more than "
            f"{_MOST_EXPERTS:,} experts, which no model has; correct one of them"
        )
    described = {one.name: getattr(found, one.name) for one in fields(found)}
    return HFConfig(**described, family=family, path=path, config=config, ignored=ignored)


def _described(family: Family, settings: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(family.reference, **copy.deepcopy(settings))  # it writes into nested ones
    family.amend(config)
    return config


def _is_at_fault(family: Family, settings: dict[str, Any], name: str) -> bool:
    """Whether transformers takes the other fields."""
    try:
        _described(family, {other: value for other, value in settings.items() if other != name})
    except Exception:
        return False
    return True


def _text_part(raw: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """`text_config`, of a file that has nothing beside it that would change the decoder."""
    part = text_fields(raw)
    if part is raw or part.get("model_type", family.text_type) != family.text_type:
        said = part.get("model_type") if part is not raw else None
        raise UserError(f"{where}: text_config.model_type is {said!r}, only {family.text_type!r} is supported")
    loader = {name: raw[name] for name in _LOADER if name in raw and raw[name] is not part}
    beside = {"tie_word_embeddings": False} | {n: raw[n] for n in sorted(decoder.READS | family.reads) if n in raw}
    for name, value in beside.items():
        if value != (inside := part.get(name, False if name == "tie_word_embeddings" else None)):
            raise UserError(
                f"{where}: {name} is {value!r:.80} beside text_config, which has {inside!r:.80}: the decoder's fields "
                "are in text_config; make them the same"
            )
    refuse_neutral(raw, NEUTRAL, where)
    types = {name: raw[name] for name in ("dtype", "torch_dtype") if name in raw}
    return types | part | loader


def family_of(raw: Mapping[str, Any]) -> Family | None:
    """The family that owns the content of a config.json."""
    kind = raw.get("model_type")
    return families().get(kind) if isinstance(kind, str) else None


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
