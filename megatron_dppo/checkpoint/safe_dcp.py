"""Loading distributed checkpoints without running code from them."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_DESCRIPTIONS = (metadata, planner, filesystem)
_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """Sizes, dtypes and the data classes that describe a checkpoint; anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        described = any(
            module == package.__name__ and isinstance(getattr(package, name, None), type) for package in _DESCRIPTIONS
        )
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if described or is_dtype or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def read_index(folder: Path) -> None:
    """Unpickle a checkpoint's index by allow-list; `pickle.UnpicklingError` names what has no place there."""
    with (folder / ".metadata").open("rb") as stream:
        _MetadataUnpickler(stream).load()


@contextlib.contextmanager
def nothing_executed() -> Iterator[None]:
    """While active, torch's distributed-checkpoint reader unpickles its index by allow-list and objects with
    `weights_only`: the stock reader runs whatever either file says."""
    register_safe_globals()
    stock = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes

    def read_metadata(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            found: Metadata = _MetadataUnpickler(stream).load()
        found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        found.storage_meta.load_id = self.load_id
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
