"""Adapters of experts as PEFT saves them with transformers 5, which holds all experts of a layer in two tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from megatron_dppo.errors import UserError
from megatron_dppo.models.names import Shape

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.lora_([AB])\.weight")
_INNER = ".base_layer"  # PEFT wraps gate_up_proj first, then down_proj around it


class StackedExperts:
    """Reads one expert's tensors out of the stacked ones, of E experts, rank r:

        experts.base_layer.lora_A `[E R, in]`    experts.base_layer.lora_B `[2 ffn, R E]`   gate and up
        experts.lora_A            `[E r, ffn]`   experts.lora_B            `[out, r E]`     down

    A is expert after expert; B's columns are r-major. R is 2 r where PEFT stacked adapters that were gate's and up's
    own (then B is block-diagonal), or r where it trained one A for both.
    """

    def __init__(self, handle: Any, experts: int, rank: int, where: str) -> None:
        self._experts, self._rank, self._where = experts, rank, where
        self._whole = cache(handle.get_tensor)  # one layer at a time would do, but an adapter is small

    @staticmethod
    def stored(names: Iterable[str]) -> bool:
        return any(f".mlp.experts{_INNER}.lora_A" in name for name in names)

    def shapes(self, single: dict[str, Shape], stored: dict[str, Shape]) -> dict[str, Shape]:
        """What a file must hold in place of the tensors of `single`, one an expert and projection."""
        result: dict[str, Shape] = {}
        for name, (rows, cols) in single.items():
            match = _EXPERT.fullmatch(name)
            if not match:
                result[name] = (rows, cols)
                continue
            both = match[3] != "down"
            stacked = self._name(match)
            first = stored.get(f"{match[1]}{_INNER}.lora_A.weight", (0,))[0]
            shared = first == self._experts * self._rank
            width = self._rank * (2 if both and not shared else 1) * self._experts
            result[stacked] = (width, cols) if match[4] == "A" else (rows * (2 if both else 1), width)
        return result

    def find(self, name: str) -> torch.Tensor | None:
        """The tensor of one expert and projection; None for what is stored as it is."""
        match = _EXPERT.fullmatch(name)
        if not match:
            return None
        whole, expert, kind, rank = self._whole(self._name(match)), int(match[2]), match[3], self._rank
        if match[4] == "A":
            mine = whole.view(self._experts, -1, whole.shape[1])[expert]
            return mine[rank:] if kind == "up" and len(mine) > rank else mine[:rank]
        mine = whole.view(whole.shape[0], -1, self._experts)[..., expert]
        if kind == "down":
            return mine
        gate, up = mine.chunk(2)
        if mine.shape[1] == rank:
            return gate if kind == "gate" else up
        if gate[:, rank:].any() or up[:, :rank].any():
            raise UserError(
                f"{self._where}: {self._name(match)} mixes the adapters of gate and up, which were trained as one of "
                f"rank {2 * rank}: that is no adapter of each of them of rank {rank}; start from another"
            )
        return gate[:, :rank] if kind == "gate" else up[:, rank:]

    @staticmethod
    def _name(match: re.Match[str]) -> str:
        return f"{match[1]}{'' if match[3] == 'down' else _INNER}.lora_{match[4]}.weight"
