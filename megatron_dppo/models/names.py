"""The language of name tables: how one Megatron-Core parameter is made of Hugging Face tensors.

Every transform cuts a parameter into rectangles (`Piece`): a block of one Hugging Face tensor, or every n-th row or
column of one, that appears unchanged or transposed in the parameter of one rank. Import copies blocks in, export copies
them out; nothing is ever computed, so a round trip is exact to the bit, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Protocol, Self

from torch import Tensor

from megatron_dppo.models.architecture import Architecture

Range = tuple[int, ...]
"""(start, stop), or (start, stop, step): what `slice` takes."""
Block = tuple[Range, ...]
"""One range per dimension of a tensor."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """`parameter[local] = tensor(hf_name)[source]`, or its transpose, both given as a range per dimension.

    `source` may have more leading dimensions than `local` (an expert of a stacked tensor): those have extent 1.
    """

    hf_name: str
    source: Block
    local: Block
    transposed: bool = False
    """The tensor has the parameter's two dimensions in the other order."""

    def from_tensor(self, block: Tensor) -> Tensor:
        """`tensor[source]` as `parameter[local]`: a view of the same numbers."""
        block = block.reshape(block.shape[len(self.source) - len(self.local) :])
        return block.transpose(0, 1) if self.transposed else block

    def to_tensor(self, block: Tensor) -> Tensor:
        """`parameter[local]` in the order of `tensor[source]`."""
        return block.transpose(0, 1) if self.transposed else block


class Transform(Protocol):
    """How one parameter, divided among `parts` ranks, is made of Hugging Face tensors."""

    def sources(self, model: Architecture) -> dict[str, Shape]:
        """Hugging Face tensors used, with their full shapes."""
        ...

    def shape(self, model: Architecture, parts: int) -> Shape:
        """Shape of the parameter on each of `parts` ranks."""
        ...

    def pieces(self, model: Architecture, part: int, parts: int) -> list[Piece]:
        """The blocks rank `part` of `parts` holds."""
        ...

    def at(self, **indices: int) -> Self:
        """The transform with `{layer}` and `{expert}` filled in."""
        ...

    def renamed(self, change: Callable[[str], str]) -> Self:
        """The transform with `change` of every tensor's name."""
        ...


class Named:
    """Changes every name a transform carries."""

    def at(self, **indices: int) -> Self:
        return self.renamed(lambda name: name.format(**indices))

    def renamed(self, change: Callable[[str], str]) -> Self:
        names = {name: change(getattr(self, name)) for name in _tensor_names(type(self))}  # type: ignore[arg-type]
        return replace(self, **names)  # type: ignore[type-var]


@cache
def _tensor_names(kind: type) -> tuple[str, ...]:
    """Looked up once: a model has tens of thousands of transforms, each made for its layer and expert."""
    return tuple(one.name for one in fields(kind) if "tensor" in one.metadata)


def tensor_name() -> str:
    """A field that is the name of a tensor, in which `at` fills `{layer}` and `{expert}`."""
    return field(metadata={"tensor": True})


@dataclass(frozen=True)
class Whole(Named):
    """The same tensor on every rank. `dims` name entries of `Architecture.dims`."""

    name: str = tensor_name()
    dims: tuple[str, ...] = ("hidden",)

    def sources(self, model: Architecture) -> dict[str, Shape]:
        return {self.name: tuple(model.dims[d] for d in self.dims)}

    def shape(self, model: Architecture, parts: int) -> Shape:
        return self.sources(model)[self.name]

    def pieces(self, model: Architecture, part: int, parts: int) -> list[Piece]:
        everything = tuple((0, n) for n in self.shape(model, parts))
        return [Piece(self.name, everything, everything)]


@dataclass(frozen=True)
class Buffer(Whole):
    """A tensor that no gradient changes: float32 whatever the weights' type, here and in every checkpoint."""


@dataclass(frozen=True)
class Columns(Named):
    """A `[rows, cols]` matrix whose columns are divided (the second matrix of a pair: row-parallel)."""

    name: str = tensor_name()
    rows: str = "hidden"
    cols: str = "hidden"

    def sources(self, model: Architecture) -> dict[str, Shape]:
        return {self.name: (model.dims[self.rows], model.dims[self.cols])}

    def shape(self, model: Architecture, parts: int) -> Shape:
        return model.dims[self.rows], model.dims[self.cols] // parts

    def pieces(self, model: Architecture, part: int, parts: int) -> list[Piece]:
        rows, width = self.shape(model, parts)
        return [Piece(self.name, ((0, rows), (part * width, (part + 1) * width)), ((0, rows), (0, width)))]


@dataclass(frozen=True)
class Vocabulary(Named):
    """`[vocabulary, hidden]`, rows divided after padding the vocabulary. Padding rows have no source: they are zero,
    never exported, and whatever reads logits must leave their columns out."""

    name: str = tensor_name()

    def sources(self, model: Architecture) -> dict[str, Shape]:
        return {self.name: (model.vocab_size, model.dims["hidden"])}

    def shape(self, model: Architecture, parts: int) -> Shape:
        return model.padded_vocab_size(parts) // parts, model.dims["hidden"]

    def pieces(self, model: Architecture, part: int, parts: int) -> list[Piece]:
        height, hidden = self.shape(model, parts)
        start, stop = part * height, min((part + 1) * height, model.vocab_size)
        if stop <= start:
            return []
        return [Piece(self.name, ((start, stop), (0, hidden)), ((0, stop - start), (0, hidden)))]


@dataclass(frozen=True)
class QKV(Named):
    """Query, key and value projections (or their biases, `cols=None`) interleaved by query group:

        q heads of group 0, k of group 0, v of group 0, q heads of group 1, ...

    and then divided by rows. With more ranks than groups a share begins and ends inside a group. With an output gate
    (`Architecture.output_gate`) the query projection has the gate of every head behind it, and the parameter those of
    the group behind its q heads.
    """

    q: str = tensor_name()
    k: str = tensor_name()
    v: str = tensor_name()
    cols: str | None = "hidden"

    def _tail(self, model: Architecture) -> Shape:
        return () if self.cols is None else (model.dims[self.cols],)

    def sources(self, model: Architecture) -> dict[str, Shape]:
        kv_rows = model.kv_heads * model.head_dim
        q_rows = (1 + model.output_gate) * model.heads * model.head_dim
        rows = {self.q: q_rows, self.k: kv_rows, self.v: kv_rows}
        return {name: (n, *self._tail(model)) for name, n in rows.items()}

    def shape(self, model: Architecture, parts: int) -> Shape:
        heads = (1 + model.output_gate) * model.heads + 2 * model.kv_heads
        return heads * model.head_dim // parts, *self._tail(model)

    def pieces(self, model: Architecture, part: int, parts: int) -> list[Piece]:
        height = self.shape(model, parts)[0]
        first, last = part * height, (part + 1) * height
        tail = tuple((0, n) for n in self._tail(model))
        result = []
        for name, source, place in self._interleaved(model):
            start, stop = max(first, place), min(last, place + source[1] - source[0])
            if start < stop:
                rows = (source[0] + start - place, source[0] + stop - place)
                result.append(Piece(name, (rows, *tail), ((start - first, stop - first), *tail)))
        return result

    def _interleaved(self, model: Architecture) -> Iterator[tuple[str, Range, int]]:
        """(tensor, its rows, where they begin in the undivided parameter), in order."""
        size, each = model.head_dim, model.heads // model.kv_heads
        place = 0
        for group in range(model.kv_heads):
            heads = range(group * each, (group + 1) * each)
            if model.output_gate:
                blocks = [(self.q, 2 * head * size, size) for head in heads]
                blocks += [(self.q, (2 * head + 1) * size, size) for head in heads]
            else:
                blocks = [(self.q, heads[0] * size, each * size)]
            for name, start, height in (*blocks, (self.k, group * size, size), (self.v, group * size, size)):
                yield name, (start, start + height), place
                place += height


@dataclass(frozen=True)
class Sections(Named):
    """A tensor of one or several parts one below the other, `rows` of `Architecture.dims` each, with `tail` dimensions
    behind: each part is divided among the ranks, and a rank has its shares one below the other."""

    name: str = tensor_name()
    rows: tuple[str, ...] = ("hidden",)
    tail: tuple[str, ...] = ()

    def _tail(self, model: Architecture) -> Shape:
        return tuple(model.dims[d] for d in self.tail)

    def sources(self, model: Architecture) -> dict[str, Shape]:
        return {self.name: self.shape(model, 1)}

    def shape(self, model: Architecture, parts: int) -> Shape:
        return sum(model.dims[d] for d in self.rows) // parts, *self._tail(model)

    def pieces(self, model: Architecture, part: int, parts: int) -> list[Piece]:
        tail, result, begin, place = tuple((0, n) for n in self._tail(model)), [], 0, 0
        for height in (model.dims[d] for d in self.rows):
            share = height // parts
            source = (begin + part * share, begin + (part + 1) * share)
            result.append(Piece(self.name, (source, *tail), ((place, place + share), *tail)))
            begin, place = begin + height, place + share
        return result


@dataclass(frozen=True)
class Below:
    """A parameter made of several, a rank's share of each below that of the one before."""

    parts: tuple[Transform, ...]

    def at(self, **indices: int) -> Self:
        return replace(self, parts=tuple(part.at(**indices) for part in self.parts))

    def renamed(self, change: Callable[[str], str]) -> Self:
        return replace(self, parts=tuple(part.renamed(change) for part in self.parts))

    def sources(self, model: Architecture) -> dict[str, Shape]:
        return {name: shape for part in self.parts for name, shape in part.sources(model).items()}

    def shape(self, model: Architecture, parts: int) -> Shape:
        shapes = [part.shape(model, parts) for part in self.parts]
        return sum(rows for rows, *_ in shapes), *shapes[0][1:]

    def pieces(self, model: Architecture, part: int, parts: int) -> list[Piece]:
        result, place = [], 0
        for one in self.parts:
            for piece in one.pieces(model, part, parts):
                (start, stop), *rest = piece.local
                result.append(replace(piece, local=((place + start, place + stop), *rest)))
            place += one.shape(model, parts)[0]
        return result


def gate_up(gate: str, up: str, rows: str = "ffn") -> Below:
    """Two `[rows, hidden]` matrices, each divided by rows, the gate's share above the up projection's."""
    return Below(tuple(Sections(name, (rows,), ("hidden",)) for name in (gate, up)))


@dataclass(frozen=True)
class ByKeyHead(Named):
    """The input projection of a delta rule, of which the checkpoint has two matrices:

        qkvz  of every key head its query, its key, the values and the gates of its value heads
        ba    of every key head the betas and the decays of its value heads

    The parameter has the rows of all heads of a rank by kind: queries, keys, values, gates, betas, decays.
    """

    qkvz: str = tensor_name()
    ba: str = tensor_name()

    def _heights(self, model: Architecture) -> dict[str, tuple[int, ...]]:
        """Of each tensor, the rows of each kind that a key head has."""
        delta = model.delta
        assert delta is not None
        each = delta.value_heads // delta.key_heads
        values = each * delta.value_dim
        return {self.qkvz: (delta.key_dim, delta.key_dim, values, values), self.ba: (each, each)}

    def sources(self, model: Architecture) -> dict[str, Shape]:
        assert model.delta is not None
        heads, hidden = model.delta.key_heads, model.dims["hidden"]
        return {name: (heads * sum(kinds), hidden) for name, kinds in self._heights(model).items()}

    def shape(self, model: Architecture, parts: int) -> Shape:
        return sum(rows for rows, _ in self.sources(model).values()) // parts, model.dims["hidden"]

    def pieces(self, model: Architecture, part: int, parts: int) -> list[Piece]:
        assert model.delta is not None
        heads, columns = model.delta.key_heads // parts, (0, model.dims["hidden"])
        result, place = [], 0
        for name, kinds in self._heights(model).items():
            before = 0
            for height in kinds:
                for head in range(part * heads, (part + 1) * heads):
                    start = head * sum(kinds) + before
                    rows = (start, start + height)
                    result.append(Piece(name, (rows, columns), ((place, place + height), columns)))
                    place += height
                before += height
        return result


Table = Mapping[str, Transform]
"""Megatron-Core parameter names, as the local layer spec has them, with `{layer}` and `{expert}` (both global)."""


def moved(table: Table, old: str, new: str) -> Table:
    """The same parameters, of tensors whose names begin with `new` where they began with `old`."""

    def change(name: str) -> str:
        return new + name.removeprefix(old) if name.startswith(old) else name

    return {parameter: transform.renamed(change) for parameter, transform in table.items()}


def is_expert(name: str) -> bool:
    """Whether a parameter (by its name in a table, numbers filled in or not) is one expert's."""
    return ".mlp.experts." in name
