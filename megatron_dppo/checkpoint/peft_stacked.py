"""Adapters of experts as PEFT saves them with transformers 5, which holds all experts of a layer in two tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.lora.sites import PEFT_PREFIX, peft_name, sites
from megatron_dppo.models.names import Shape


@dataclass(frozen=True)
class _Place:
    """Where the matrix of one projection of one expert is."""

    tensor: str
    matrix: str
    """A or B."""
    expert: int
    kind: int
    """0 for gate, 1 for up; 0 for down."""
    kinds: int
    """Projections in the tensor: 2 of gate and up, 1 of down."""


class StackedExperts:
    """Reads one expert's tensors out of the stacked ones, of E experts, rank r:

        experts.base_layer.lora_A `[E R, in]`    experts.base_layer.lora_B `[2 ffn, R E]`   gate and up
        experts.lora_A            `[E r, ffn]`   experts.lora_B            `[out, r E]`     down

    A is expert after expert; B's columns are r-major. R is 2 r where PEFT stacked adapters that were gate's and up's
    own (then B is block-diagonal), or r where it trained one A for both.
    """

    def __init__(self, handle: Any, model: HFConfig, config: LoraConfig, where: str) -> None:
        assert model.moe is not None
        self._experts, self._rank, self._where = model.moe.experts, config.rank, where
        self._whole = cache(handle.get_tensor)  # one layer at a time would do, but an adapter is small
        self._places = _places(model, config)

    @staticmethod
    def stored(model: HFConfig, config: LoraConfig, names: Iterable[str]) -> bool:
        """Whether a file with tensors of these names holds experts so."""
        return not {place.tensor for place in _places(model, config).values()}.isdisjoint(names)

    def shapes(self, single: dict[str, Shape], stored: dict[str, Shape]) -> dict[str, Shape]:
        """What a file must hold in place of the tensors of `single`, one an expert and projection."""
        result: dict[str, Shape] = {}
        for name, (rows, cols) in single.items():
            place = self._places.get(name)
            if place is None:
                result[name] = (rows, cols)
                continue
            first = stored.get(place.tensor.replace("lora_B", "lora_A"), (0,))[0]
            shared = first == self._experts * self._rank
            width = self._rank * (1 if shared else place.kinds) * self._experts
            result[place.tensor] = (width, cols) if place.matrix == "A" else (rows * place.kinds, width)
        return result

    def find(self, name: str) -> torch.Tensor | None:
        """The tensor of one expert and projection; None for what is stored as it is."""
        place, rank = self._places.get(name), self._rank
        if place is None:
            return None
        whole = self._whole(place.tensor)
        if place.matrix == "A":
            mine = whole.view(self._experts, -1, whole.shape[1])[place.expert]
            return mine[rank:] if place.kind == 1 and len(mine) > rank else mine[:rank]
        mine = whole.view(whole.shape[0], -1, self._experts)[..., place.expert]
        if place.kinds == 1:
            return mine
        gate, up = mine.chunk(2)
        if mine.shape[1] == rank:
            return up if place.kind else gate
        if gate[:, rank:].any() or up[:, :rank].any():
            raise UserError(
                f"{self._where}: {place.tensor} mixes the adapters of gate and up, which were trained as one of "
                f"rank {2 * rank}: that is no adapter of each of them of rank {rank}; start from another"
            )
        return up[:, rank:] if place.kind else gate[:, :rank]


def _places(model: HFConfig, config: LoraConfig) -> dict[str, _Place]:
    """By the name of the single tensor. PEFT wraps the tensor of gate and up first, then that of down around it."""
    stacked = dict(model.parameters(stacked=True)) if model.family.stacked else {}
    places = {}
    for site in sites(model, config).values():
        if site.expert is None or site.name not in stacked:
            continue
        (tensor,) = stacked[site.name].sources(model)
        module = PEFT_PREFIX + tensor.rpartition(".")[0] + (".base_layer" if len(site.sources) > 1 else "")
        for kind, single in enumerate(site.sources):
            for matrix in "AB":
                place = _Place(f"{module}.lora_{matrix}.weight", matrix, site.expert, kind, len(site.sources))
                places[peft_name(single, matrix)] = place
    return places
