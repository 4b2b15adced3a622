"""What a model family declares. One file per family in `families/`, or in a package of one's own; nothing else names
them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.families import decoder, tables
from megatron_dppo.models.names import Table

ENTRY_POINTS = "megatron_dppo.families"
"""Group under which an installed package names its families: `NAME = "package.module:FAMILY"`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model type of transformers: what its config.json means, and how Megatron-Core's model is made of its tensors.

    What the trainer, the planner, adapters, routes and engines need is derived from `read` and `layer`.
    """

    model_type: str
    """`model_type` of config.json, which names the class of transformers that is the reference."""
    text_type: str = ""
    """Of a model that sees images too, in whose config.json the decoder's fields are in `text_config`: `model_type`
    there, which names the reference in place of the other. What else the file has is passed on."""
    architecture: str
    """Class that `architectures` of config.json must name."""
    read: Callable[[PreTrainedConfig], Architecture]
    """The architecture, from the configuration that transformers resolved. `UserError` (field, what is wrong) for what
    is not supported."""
    layer: Callable[[Architecture, int], Table]
    """Parameters of decoder layer number `layer` (from 0), with `{layer}` and `{expert}` in their names."""
    reads: frozenset[str] = frozenset()
    """Fields that `read` looks at besides `decoder.READS`. Any other that transformers' class reads must be at its
    default."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Config fields that change the mathematics, with the only value supported; any other is refused by name. They come
    on top of `decoder.FIXED`."""
    amend: Callable[[PreTrainedConfig], None] = lambda config: None
    """Puts right what transformers makes of a published config.json, before `read` and wherever its class computes."""
    engine: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Config fields that vLLM reads for this model type and transformers does not, with the values that change nothing;
    they come on top of `engine_fields.NEUTRAL`."""
    engine_takes: Mapping[str, Any] = field(default_factory=dict)
    """Config fields that transformers reads and vLLM's model does not, with the value that it goes by."""
    engine_divides_heads: bool = False
    """vLLM's model takes hidden_size / num_attention_heads for the size of a head."""
    engine_scales_by_mscale: bool = False
    """With yarn vLLM's model scales queries and keys by `mscale` and `mscale_all_dim` of the rotary settings."""
    image_positions: bool = False
    """The rotary settings may say which pairs an image's rows and columns rotate (`mrope_section`); text has one
    position for all of them."""
    ends: Table = field(default_factory=lambda: tables.ENDS)
    """Embedding, last norm and output layer."""
    stacked: Mapping[str, str] = field(default_factory=dict)
    """Where a checkpoint may hold the experts of a layer in one tensor: that tensor, by the parameter of one expert."""
    writes_stacked: bool = False
    """Checkpoints are published so, and those written here are too."""
    carried: tuple[str, ...] = ()
    """Beginnings of the names of tensors that a checkpoint may hold beside the model's: they are not trained, and pass
    from checkpoint to checkpoint."""
    megatron: Callable[[Architecture], dict[str, Any]] = decoder.megatron_fields
    """Fields of Megatron-Core's `TransformerConfig` that the architecture decides."""
    aliases: tuple[str, ...] = ()
    """Other `model_type`s that are this one."""
    spec: str = ""
    """`module:function` that changes Megatron-Core's layer specs, called with the block's spec, the architecture and
    the process groups; `metainfo["number"]` of a layer's spec is its number, from 0. A path: families are read where
    there is no Megatron-Core (engines, the planner)."""

    @property
    def reference(self) -> str:
        """Model type of transformers' class that computes the same."""
        return self.text_type or self.model_type


def text_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json's content that describes the decoder: all of it, or that of a model that sees images
    too."""
    part = raw.get("text_config")
    return part if isinstance(part, dict) else raw


def transformers_config(folder: Path) -> PreTrainedConfig:
    """transformers' configuration of a folder, put right by the family of its model type where there is one, and under
    the name by which transformers knows it; of a family's model that sees images too, that of its text part."""
    raw = read_json_object(folder / "config.json")
    family = families().get(str(raw.get("model_type")))
    if family is None or raw["model_type"] == family.model_type:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    else:
        fields = {name: value for name, value in raw.items() if name != "model_type"}
        config = AutoConfig.for_model(family.model_type, **fields)
    if family is not None:
        whole, config = config, config.get_text_config()
        if (quantized := getattr(whole, "quantization_config", None)) is not None:
            config.quantization_config = quantized
        family.amend(config)
    return config


@cache
def families() -> Mapping[str, Family]:
    """All families by `model_type` and alias: those of `families/`, then those that installed packages name."""
    from megatron_dppo.models import families as package

    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    found: list[tuple[str, Any]] = [(m.__name__, m.FAMILY) for m in modules if hasattr(m, "FAMILY")]
    found += [(point.value, point.load()) for point in entry_points(group=ENTRY_POINTS)]
    known: dict[str, Family] = {}
    for where, family in found:
        if not isinstance(family, Family):
            raise UserError(f"entry point {where} of {ENTRY_POINTS} is a {type(family).__name__}; it must be a Family")
        for name in (family.model_type, *family.aliases):
            if name in known:
                raise UserError(f"two families are called {name!r}, the second is {where}; uninstall one")
            known[name] = family
    return known
