"""Which weight matrices get adapters, and what Hugging Face tensors those adapters are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import Owned
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.lora.size import PARAMETERS, check_targets
from megatron_dppo.models.names import Columns, Piece, Shape

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Site:
    """One weight matrix with an adapter for each Hugging Face tensor it is made of."""

    name: str
    """Of the parameter, as in `Owned`."""
    sources: dict[str, Shape]
    """Those tensors with their whole shapes, in the order in which their A matrices are stacked."""
    input_sharded: bool
    """Row-parallel: each tensor-parallel rank has some columns of the weight; otherwise some rows."""

    @property
    def expert(self) -> int | None:
        """The expert's number in the whole model."""
        match = _EXPERT.search(self.name)
        return int(match[1]) if match else None

    @property
    def key(self) -> str:
        """The name without `.weight` and the expert's number: what all experts of a layer share."""
        return _EXPERT.sub(".experts.", self.name.removesuffix(".weight"))


@dataclass(frozen=True)
class LocalSite:
    """A site as one rank holds it."""

    site: Site
    owned: Owned


def sites(model: HFConfig, config: LoraConfig) -> dict[str, Site]:
    """Every site of the whole model, by parameter name. `UserError` where a target fits no layer."""
    check_targets(model, config)
    found: dict[str, Site] = {}
    for name, transform in model.parameters():
        for target in config.targets:
            if PARAMETERS[target].fullmatch(name):
                found[name] = Site(name, transform.sources(model), isinstance(transform, Columns))
    return found


def peft_name(tensor: str, matrix: str) -> str:
    """PEFT's name of the `A` or `B` beside a Hugging Face weight."""
    return f"{PEFT_PREFIX}{tensor.removesuffix('.weight')}.lora_{matrix}.weight"


def adapter_tensors(model: HFConfig, config: LoraConfig) -> dict[str, Shape]:
    """Every tensor of the whole model's adapter, by PEFT's name, in model order."""
    shapes: dict[str, Shape] = {}
    for site in sites(model, config).values():
        for tensor, (rows, cols) in site.sources.items():
            shapes[peft_name(tensor, "A")] = (config.rank, cols)
            shapes[peft_name(tensor, "B")] = (rows, config.rank)
    return shapes


def a_pieces(local: LocalSite, index: int, rank: int) -> Iterator[Piece]:
    """The blocks of `a[index]`, the A matrices stacked: whole, or the columns of this rank."""
    columns = local.owned.pieces[0].source[1], local.owned.pieces[0].local[1]
    for kind, tensor in enumerate(local.site.sources):
        rows = (kind * rank, (kind + 1) * rank)
        yield Piece(peft_name(tensor, "A"), ((0, rank), columns[0]), ((index, index + 1), rows, columns[1]))


def b_pieces(local: LocalSite, index: int, rank: int, height: int) -> Iterator[Piece]:
    """The blocks of `b[index]`, whose rows are the weight's in parts of `height`."""
    for piece in local.owned.pieces:
        part, (start, stop) = piece.local[0][0] // height, piece.local[0]
        rows = (start - part * height, stop - part * height)
        target = ((index, index + 1), (part, part + 1), rows, (0, rank))
        yield Piece(peft_name(piece.hf_name, "B"), (piece.source[0], (0, rank)), target)
