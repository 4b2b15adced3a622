"""What a model family declares. One file per family in `families/`; nothing else names them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatron_dppo.models.names import Table


@dataclass(frozen=True, kw_only=True)
class Family:
    """A decoder-only transformer: pre-norm RMSNorm, rotary positions, grouped-query attention, gated SiLU MLP."""

    model_type: str
    """`model_type` of config.json."""
    architecture: str
    """Class that `architectures` of config.json must name."""
    table: Table
    """Megatron-Core names to Hugging Face tensors; entries with `{expert}` and the router belong to expert layers."""
    qkv_bias: bool = False
    """Query, key and value projections carry a bias, whatever the config says."""
    qk_norm: bool = False
    """Queries and keys pass an RMSNorm per head before the rotation."""
    moe: bool = False
    """Layers can be mixtures of experts."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Config fields that change the mathematics, with the only value supported; any other is refused by name."""


@cache
def families() -> dict[str, Family]:
    """All families by `model_type`."""
    from megatron_dppo.models import families as package

    found = [
        importlib.import_module(f"{package.__name__}.{module.name}").FAMILY
        for module in pkgutil.iter_modules(package.__path__)
    ]
    return {family.model_type: family for family in found}
