"""The folders of Megatron-LM and Megatron-Bridge (`--ckpt-format torch_dist`): found, checked, read block by block.

    root/latest_checkpointed_iteration.txt   `100` or `release`
    root/iter_0000100/                       or root/release/
        metadata.json                        which format the folder has; written last
        .metadata                            pickled index: every tensor of the whole model, and where its parts are
        __0_0.distcp ...                     the parts
        common.pt                            pickled: arguments and counters (now one of the parts)
        run_config.yaml                      Megatron-Bridge: the model's configuration

A tensor there is a parameter of the whole model, whatever the layout that wrote it. Its name has forms: the number of a
layer is in the name or the first dimension, that of an expert likewise, and both halves of a gated matrix may have
names of their own.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from megatron_dppo.checkpoint.hf_files import DTYPES, StoredTensor, most_common_dtype, refuse_tensors
from megatron_dppo.checkpoint.safe_dcp import INDEX, read_index
from megatron_dppo.checkpoint.weight_layout import extent
from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.names import Block, Piece, Range, Shape, Vocabulary

MARKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
COMMON, COMMON_KEY = "common.pt", "common_state/"
OUTPUT_LAYER = "output_layer.weight"
_FORMAT = "metadata.json"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_NO_WEIGHT = re.compile(r"(optimizer|chained_\d+)\.")
FUSED = {
    "input_layernorm.weight": (
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.in_proj.layer_norm_weight",
    ),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",),
    "self_attention.q_layernorm.weight": ("self_attention.linear_q_up_proj.layer_norm_weight",),
    "self_attention.kv_layernorm.weight": ("self_attention.linear_kv_up_proj.layer_norm_weight",),
}
"""Norms that TransformerEngine fuses into the linear layer after it."""
_DELTA = {
    "self_attention.in_proj.weight": {
        **{"query": "delta_key", "key": "delta_key", "value": "delta_value"},
        **{"z": "delta_value", "beta": "delta_heads", "alpha": "delta_heads"},
    },
    "self_attention.conv1d.weight": {"query": "delta_key", "key": "delta_key", "value": "delta_value"},
}
"""Parameters of which each part has a name of its own, `KEY.PART`, and the parts' rows."""
LESS_ONE = "self_attention.out_norm.weight"
"""Megatron-LM has this norm of a gated delta layer as a factor of 1 + weight, Hugging Face as one of weight."""


def find_iteration(folder: Path) -> Path | None:
    """The folder of one iteration: the one that the marker in `folder` names, or the only one there, or `folder`
    itself. None where it is nothing of Megatron-LM's; `UserError` where the marker is wrong or a choice is left."""
    marker = folder / MARKER
    if marker.is_file():
        name = marker.read_bytes().decode(errors="replace").strip()
        if name != RELEASE and not re.fullmatch(r"[0-9]{1,12}", name):
            raise UserError(f"{marker} says {name[:40]!r}; it must hold the number of an iteration or {RELEASE}")
        chosen = folder / (name if name == RELEASE else f"iter_{int(name):07d}")
        if not chosen.is_dir():
            others = ", ".join(p.name for p in _iterations(folder)) or "none"
            raise UserError(f"{marker} names {chosen.name}, which is not there (there: {others}); correct it")
        return chosen
    if (folder / INDEX).is_file() or any(folder.glob("mp_rank_*")):
        return folder
    found = _iterations(folder)
    if len(found) > 1:
        raise UserError(f"{folder} has {', '.join(p.name for p in found)} and no {MARKER}; name one of them")
    return found[0] if found else None


def _iterations(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.iterdir()) if re.fullmatch(rf"iter_\d+|{RELEASE}", p.name) and p.is_dir()]


@dataclass(frozen=True)
class _Slab:
    """Rows `begin` to `end` of a parameter of the whole model: `stored[key][index]`, with `of` entries along each
    dimension of `index`."""

    key: str
    index: tuple[int, ...]
    of: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class _Place:
    """A piece of a parameter of the whole model, and where that is stored."""

    piece: Piece
    slabs: tuple[_Slab, ...]


class MegatronFiles:
    """The weights in the folder of one iteration, as the Hugging Face tensors of `model`; stands for `HFFiles`.

    Nothing of the folder is executed, and no more than one stored part is in memory (a matrix, as a rank wrote it).
    `UserError`: another format, a damaged file, code in a pickled one, parameters of the model that are not stored,
    stored ones that the model has no place for, other shapes. Rows of the vocabulary beyond the model's are padding
    and are left out.
    """

    def __init__(self, folder: Path, model: HFConfig) -> None:
        _require_format(folder)
        self.folder, self._model = folder, model
        try:
            self._index = read_index(folder)
        except pickle.UnpicklingError as error:
            raise UserError(f"{folder / INDEX} is not read: {error}; fetch the folder again") from None
        described = self._index.state_dict_metadata
        tensors = {key: entry for key, entry in described.items() if isinstance(entry, TensorStorageMetadata)}
        self.left_out = [key for key in tensors if _NO_WEIGHT.match(key)]
        """Tensors of the optimizer."""
        self._stored = {key: entry for key, entry in tensors.items() if not _NO_WEIGHT.match(key)}
        self._places: dict[str, list[_Place]] = defaultdict(list)
        self._parts: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        self._last: tuple[MetadataIndex, torch.Tensor] | None = None
        self._less_one: set[str] = set()
        self._find_all()
        self.tensors = {name: self._describe(name, shape) for name, shape in model.tensors.items()}
        for name in self._less_one:
            narrowest = min(self.dtype, self.tensors[name].dtype, key=lambda dtype: dtype.itemsize)
            self.tensors[name] = replace(self.tensors[name], dtype=narrowest)

    @property
    def dtype(self) -> torch.dtype:
        """The type of most of the numbers."""
        return most_common_dtype(self.tensors.values())

    def read(self, name: str, block: Block) -> torch.Tensor:
        """A copy of one block, in the dtype that `tensors` says."""
        result = torch.empty(extent(block), dtype=self._stored[self._places[name][0].slabs[0].key].properties.dtype)
        covered = 0
        for place in self._places[name]:
            wanted = _common(block, place.piece.source)
            if wanted is None:
                continue
            local = _inside(place.piece, wanted)
            target = place.piece.from_tensor(result[_within(wanted, block)])
            for slab in place.slabs:
                rows = max(local[0][0], slab.begin), min(local[0][1], slab.end)
                if rows[0] < rows[1]:
                    stored = (rows[0] - slab.begin, rows[1] - slab.begin), *local[1:]
                    covered += self._copy(slab, stored, target[rows[0] - local[0][0] : rows[1] - local[0][0]])
        if covered != result.numel():
            raise UserError(f"{self.folder} holds {covered} of {result.numel()} numbers of {name}; fetch it again")
        return (result.double() + 1).to(self.tensors[name].dtype) if name in self._less_one else result

    def close(self) -> None:
        self._last = None

    def common(self) -> dict[str, Any]:
        """Arguments and counters. `UserError` names a global that has no place there; nothing is executed."""
        register_safe_globals()
        where = self.folder / COMMON
        try:
            if where.is_file():
                loaded = torch.load(where, map_location="cpu", weights_only=True)
            else:
                entry = next((i for i in self._index.storage_data if i.fqn.startswith(COMMON_KEY)), None)
                if entry is None:
                    return {}
                where = self.folder / self._index.storage_data[entry].relative_path
                (loaded,) = torch.load(io.BytesIO(self._bytes(entry)), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever bytes make an unpickler do
            raise UserError(f"{where}: the common state is not read: {_reason(error)}; fetch it again") from None
        if not isinstance(loaded, dict):
            raise UserError(
                f"{where}: the common state is a {type(loaded).__name__}, it must be a dict; fetch it again"
            )
        return loaded

    def _find_all(self) -> None:
        missing, wrong, used = [], [], set()
        for name, transform in self._model.parameters():
            if name == OUTPUT_LAYER and self._model.tied:
                continue  # stored once
            shape = transform.shape(self._model, 1)
            slabs = self._find(name, shape[0])
            if name.endswith(LESS_ONE):
                self._less_one |= transform.sources(self._model).keys()
            if not slabs:
                missing.append(name)
                continue
            used |= {slab.key for slab in slabs}
            least = self._model.vocab_size if isinstance(transform, Vocabulary) else None
            wrong += [problem for slab in slabs if (problem := self._misfit(slab, shape, least))]
            for piece in transform.pieces(self._model, 0, 1):
                self._places[piece.hf_name].append(_Place(piece, tuple(slabs)))
        kind = self._model.family.model_type
        faults = {
            "lacks": missing,
            "does not fit:": wrong,
            f"has what {kind} has no place for:": sorted(self._stored.keys() - used),
        }
        refuse_tensors(self.folder, faults, f"it is of another model than the config.json in {self._model.path}")

    def _find(self, name: str, rows: int) -> list[_Slab]:
        for key, indices in self._forms(name):
            index, of = tuple(i for i, _ in indices), tuple(n for _, n in indices)
            if key in self._stored:
                return [_Slab(key, index, of, 0, rows)]
            for parts in self._in_parts(key, rows):
                if all(part in self._stored for part in parts):
                    ends = list(accumulate(parts.values(), initial=0))
                    return [_Slab(p, index, of, *ends[i : i + 2]) for i, p in enumerate(parts)]
        return []

    def _in_parts(self, key: str, rows: int) -> Iterator[dict[str, int]]:
        """Names of the parts that a parameter may be stored in, one below the other, with their rows."""
        yield {f"{key}_w": rows // 2, f"{key}_v": rows // 2}
        for parameter, parts in _DELTA.items() if self._model.delta else ():
            if key.endswith(parameter):
                yield {f"{key}.{part}": self._model.dims[size] for part, size in parts.items()}

    def _forms(self, name: str) -> Iterator[tuple[str, tuple[Range, ...]]]:
        """Under which names a parameter may be stored, and its (index, of how many) in that tensor."""
        match = _LAYER.fullmatch(name)
        if not match:
            yield name, ()
            return
        layer, rest = int(match[1]), match[2]
        inside: list[tuple[str, tuple[Range, ...]]] = [(rest, ())]
        inside += [(fused, ()) for fused in FUSED.get(rest, ())]
        if (expert := _EXPERT.fullmatch(rest)) and self._model.moe:
            inside = [
                (f"mlp.experts.experts.{expert[2]}", ((int(expert[1]), self._model.moe.experts),)),
                (f"mlp.experts.experts.{expert[1]}.{expert[2]}", ()),
            ]
        for form, indices in inside:
            yield f"decoder.layers.{layer}.{form}", indices
            yield f"decoder.layers.{form}", ((layer, self._model.layers), *indices)

    def _misfit(self, slab: _Slab, shape: Shape, least: int | None) -> str | None:
        """Why a stored tensor is none of a parameter of this shape. `least`: rows that a vocabulary has at least."""
        entry = self._stored[slab.key]
        stored, right = tuple(entry.size), (*slab.of, slab.end - slab.begin, *shape[1:])
        if entry.properties.dtype not in DTYPES.values():
            return f"{slab.key} is stored as {entry.properties.dtype}"
        if least is not None and stored[1:] == right[1:]:
            return None if stored[0] >= least else f"{slab.key} has {stored[0]} rows, vocab_size is {least}"
        return None if stored == right else f"{slab.key} is {stored} in place of {right}"

    def _describe(self, name: str, shape: Shape) -> StoredTensor:
        keys = [slab.key for place in self._places[name] for slab in place.slabs]
        kinds = {self._stored[key].properties.dtype for key in keys}
        if len(kinds) != 1:
            raise UserError(f"{self.folder} holds {name} in several types ({', '.join(map(str, kinds))})")
        first = MetadataIndex(keys[0], self._stored[keys[0]].chunks[0].offsets)
        return StoredTensor(self.folder / self._stored_at(first).relative_path, shape, kinds.pop())

    def _copy(self, slab: _Slab, block: Block, target: torch.Tensor) -> int:
        """Fill `target` with a block of a slab; how many numbers the stored parts had of it."""
        depth, copied = len(slab.index), 0
        for chunk in self._chunks(slab.key, depth).get(slab.index, ()):
            offsets, sizes = chunk.offsets[depth:], chunk.sizes[depth:]
            held = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
            wanted = _common(block, held)
            if wanted is None:
                continue
            part = self._part(slab.key, chunk)[tuple(i - o for i, o in zip(slab.index, chunk.offsets, strict=False))]
            value = part[_within(wanted, held)]
            target[_within(wanted, block)].copy_(value)
            copied += value.numel()
        return copied

    def _chunks(self, key: str, depth: int) -> dict[tuple[int, ...], list[ChunkStorageMetadata]]:
        """The stored parts of a tensor by the first `depth` indices: a whole model's are hundreds of thousands."""
        if (key, depth) not in self._parts:
            found: dict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
            for chunk in self._stored[key].chunks:
                spans = zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True)
                for index in product(*(range(start, start + size) for start, size in spans)):
                    found[index].append(chunk)
            self._parts[key, depth] = found
        return self._parts[key, depth]

    def _part(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        entry = MetadataIndex(key, chunk.offsets)
        if self._last is None or self._last[0] != entry:
            self._last = None
            file = self.folder / self._stored_at(entry).relative_path
            try:
                value = torch.load(io.BytesIO(self._bytes(entry)), map_location="cpu", weights_only=True)
                right = isinstance(value, torch.Tensor) and value.shape == chunk.sizes
                if not right or value.dtype != self._stored[key].properties.dtype:
                    raise ValueError("it is no tensor of that shape and type")
            except Exception as error:  # whatever bytes make an unpickler do
                raise UserError(f"{file}: {key} is not read: {_reason(error)}; fetch the file again") from None
            self._last = entry, value
        return self._last[1]

    def _stored_at(self, entry: MetadataIndex) -> Any:
        try:
            return self._index.storage_data[entry]
        except KeyError:
            raise UserError(f"{self.folder / INDEX} does not say where {entry.fqn} is; fetch it again") from None

    def _bytes(self, entry: MetadataIndex) -> bytes:
        place = self._stored_at(entry)
        with (self.folder / place.relative_path).open("rb") as handle:
            handle.seek(place.offset)
            return handle.read(place.length)


def _reason(error: Exception) -> str:
    """Of a pickle that was not read: torch says of code at length what it would be."""
    code = re.search(r"GLOBAL (\S+)", str(error))
    return f"{code[1]} has no place there" if code else f"{error!r:.200}"


def _common(first: Block, second: Block) -> Block | None:
    """What two blocks share. Every n-th row or column is wanted as it was cut, or not at all."""
    shared = tuple(a if a == b else (max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(first, second, strict=True))
    stepped = any(a != b and len(a + b) > 4 for a, b in zip(first, second, strict=True))
    return shared if not stepped and all(a[0] < a[1] for a in shared) else None


def _within(inner: Block, outer: Block) -> tuple[slice, ...]:
    """Where `inner` lies in a tensor that holds `outer`."""
    return tuple(slice(None) if i == o else slice(i[0] - o[0], i[1] - o[0]) for i, o in zip(inner, outer, strict=True))


def _inside(piece: Piece, wanted: Block) -> Block:
    """Where the parameter has `wanted`, a part of a piece's source."""
    extra = len(piece.source) - len(piece.local)  # leading dimensions that only the tensor has, of extent 1
    both = list(zip(wanted, piece.source, strict=True))[extra:]
    moved = zip(reversed(both) if piece.transposed else both, piece.local, strict=True)
    return tuple(to if w == s else (w[0] - s[0] + to[0], w[1] - s[0] + to[0]) for (w, s), to in moved)


def _require_format(folder: Path) -> None:
    if any(folder.glob("mp_rank_*")):
        raise UserError(
            f"{folder} has files of its ranks (--ckpt-format torch), which are not read; let Megatron-LM load it and "
            "save it with --ckpt-format torch_dist"
        )
    described = folder / _FORMAT
    if not described.is_file():
        raise UserError(
            f"{folder} has no {_FORMAT}: its save was not finished, or its format is not torch_dist; save it with "
            "--ckpt-format torch_dist"
        )
    kind = read_json_object(described).get("sharded_backend")
    if kind != "torch_dist":
        raise UserError(f"{described} says {kind!r}; only torch_dist is read: save it with --ckpt-format torch_dist")
