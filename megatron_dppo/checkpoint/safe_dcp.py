"""Loading distributed checkpoints without running code from them."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from megatron_dppo.errors import of_system

INDEX = ".metadata"
_DESCRIPTIONS = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
_FIELDS: dict[type, set[str]] = {kind: {field.name for field in dataclasses.fields(kind)} for kind in _DESCRIPTIONS}
_FIELDS[Metadata].add("mcore_data")  # Megatron-Core's: shapes of tensors that it stores in another shape
_FIELDS[MCoreMetadata] = _FIELDS[Metadata]  # an index of Megatron-Core 0.15
_ALLOWED = {(kind.__module__, kind.__name__) for kind in (*_FIELDS, metadata._MEM_FORMAT_ENCODING)} | {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


_Unpickler: Any = pickle._Unpickler


class _IndexUnpickler(_Unpickler):
    """Sizes, dtypes and the data classes that describe a checkpoint; anything else is refused, and so is setting an
    attribute of anything but a field of an object of these classes: of the class itself, it would stay for all that the
    process loads afterwards. Python's own unpickler, since that of C cannot be told to refuse this, and reserves as
    much memory as the file asks for."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")

    def load_build(self) -> None:
        target, state = self.stack[-2:]
        fields = _FIELDS.get(type(target))
        sets_fields = fields is not None and isinstance(state, dict) and state.keys() <= fields
        if not sets_fields and not (isinstance(target, TensorProperties) and isinstance(state, tuple)):
            raise pickle.UnpicklingError(f"it sets what is no field of {target!r:.80}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def read_index(folder: Path) -> Metadata:
    """A checkpoint's index, unpickled by allow-list. `pickle.UnpicklingError` names what has no place there: code,
    other objects, files elsewhere than in the folder, or parts that lie outside of their files. `OSError` where a file
    cannot be read."""
    stored_index = (folder / INDEX).read_bytes()
    try:
        found = _IndexUnpickler(io.BytesIO(stored_index)).load()
        if isinstance(found, MCoreMetadata):
            found = Metadata(**{name: value for name, value in vars(found).items() if name != "mcore_data"})
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # whatever bytes make an unpickler do
        raise pickle.UnpicklingError(f"its index {INDEX} is damaged ({error!r:.200})") from None
    sizes: dict[str, int] = {}
    try:
        for key, described in found.state_dict_metadata.items():
            _check_entry(key, described)
        for index, stored in found.storage_data.items():
            name = stored.relative_path
            if name not in sizes:
                if Path(name).name != name or name in ("", ".", ".."):
                    raise pickle.UnpicklingError(f"its index {INDEX} names {name!r:.80}, a file outside the folder")
                sizes[name] = (folder / name).stat().st_size
            if index.fqn not in found.state_dict_metadata or stored.transform_descriptors:
                raise pickle.UnpicklingError(f"its index {INDEX} has no description of {index.fqn!r:.80}")
            if not 0 <= stored.offset <= stored.offset + stored.length <= sizes[name]:
                raise pickle.UnpicklingError(f"its index {INDEX} places {index.fqn!r:.80} outside of {name}")
    except (AttributeError, TypeError, ValueError, OSError) as error:
        if of_system(error):
            raise
        raise pickle.UnpicklingError(f"its index {INDEX} is damaged ({error!r:.200})") from None
    assert isinstance(found, Metadata)
    return found


def _check_entry(key: Any, described: Any) -> None:
    if not isinstance(key, str) or not isinstance(described, TensorStorageMetadata | BytesStorageMetadata):
        raise TypeError(f"{key!r:.80} is no tensor and no object")
    if isinstance(described, TensorStorageMetadata):
        spans = [(chunk.offsets, chunk.sizes) for chunk in described.chunks]
        if not isinstance(described.properties.dtype, torch.dtype) or any(
            len(offsets) != len(described.size) or len(sizes) != len(described.size) for offsets, sizes in spans
        ):
            raise ValueError(f"{key:.80} has pieces of other dimensions")


@contextlib.contextmanager
def nothing_executed(folder: Path) -> Iterator[None]:
    """While active, torch's distributed-checkpoint reader takes the index of `folder` from `read_index` and unpickles
    objects with `weights_only`: the stock reader runs whatever either file says. `pickle.UnpicklingError` as there."""
    register_safe_globals()
    stock = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes
    index = read_index(folder)  # once: the reader asks several times, and reports a refused one as missing

    def read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        if Path(self.path) != folder:
            raise ValueError(f"{self.path} is read while {folder} is loaded")
        found = copy.copy(index)
        found.storage_meta = dataclasses.replace(index.storage_meta or StorageMeta(), load_id=self.load_id)
        return found

    def load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
        else:
            self.state_dict[read_item.dest_index.fqn] = loaded

    FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes = read_metadata, load_bytes  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes = stock  # type: ignore[method-assign]
