"""How one expert's parameter is made of a tensor that holds those of all experts of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from megatron_dppo.models.architecture import Architecture
from megatron_dppo.models.names import Named, Piece, Range, Shape, Transform, tensor_name


@dataclass(frozen=True)
class Stacked:
    """A matrix of one expert where the checkpoint holds those of all experts in one tensor `[experts, rows, cols]`: the
    tensors of `single`, one below the other."""

    name: str
    single: Transform
    expert: int = 0

    def at(self, **indices: int) -> Self:
        single, expert = self.single.at(**indices), indices.get("expert", self.expert)
        return replace(self, name=self.name.format(**indices), single=single, expert=expert)

    def renamed(self, change: Callable[[str], str]) -> Self:
        return replace(self, name=change(self.name), single=self.single.renamed(change))

    def sources(self, model: Architecture) -> dict[str, Shape]:
        shapes = list(self.single.sources(model).values())
        return {self.name: (model.dims["experts"], sum(rows for rows, _ in shapes), shapes[0][1])}

    def shape(self, model: Architecture, parts: int) -> Shape:
        return self.single.shape(model, parts)

    def pieces(self, model: Architecture, part: int, parts: int) -> list[Piece]:
        begins: dict[str, int] = {}
        height = 0
        for name, shape in self.single.sources(model).items():
            begins[name] = height
            height += shape[0]
        result = []
        for piece in self.single.pieces(model, part, parts):
            (start, stop), columns = piece.source
            begin = begins[piece.hf_name]
            source = ((self.expert, self.expert + 1), (begin + start, begin + stop), columns)
            result.append(Piece(self.name, source, piece.local))
        return result


@dataclass(frozen=True)
class OfAll(Named):
    """A matrix or bias of one expert where the checkpoint has those of all experts in one tensor with the outputs last:
    `[experts, inputs, outputs]`, `[experts, outputs]`. Never divided: such experts are whole on a rank.

    `pairs`: the tensor's outputs are gate and up projection in turn; the parameter's, all of the gate above all of up.
    """

    name: str = tensor_name()
    outputs: str = "moe_ffn"
    inputs: str | None = "hidden"
    """None: a bias."""
    pairs: bool = False
    expert: int = 0

    def at(self, **indices: int) -> Self:
        return replace(super().at(**indices), expert=indices.get("expert", self.expert))

    def sources(self, model: Architecture) -> dict[str, Shape]:
        return {self.name: (model.dims["experts"], *reversed(self.shape(model, 1)))}

    def shape(self, model: Architecture, parts: int) -> Shape:
        outputs = model.dims[self.outputs] * (2 if self.pairs else 1)
        return (outputs,) if self.inputs is None else (outputs, model.dims[self.inputs])

    def pieces(self, model: Architecture, part: int, parts: int) -> list[Piece]:
        if parts > 1:
            raise RuntimeError(f"{self.name} is not divided among {parts} ranks")
        outputs, *inputs = self.shape(model, parts)
        whole = tuple((0, n) for n in inputs)
        one = (self.expert, self.expert + 1)
        step = 2 if self.pairs else 1
        height = outputs // step
        result = []
        for kind in range(step):
            columns: Range = (kind, outputs, step) if self.pairs else (0, outputs)
            rows = (kind * height, (kind + 1) * height)
            result.append(Piece(self.name, (one, *whole, columns), (rows, *whole), transposed=bool(inputs)))
        return result
