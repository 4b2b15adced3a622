"""The safetensors files of a Hugging Face checkpoint: headers checked at once, blocks read as needed."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from megatron_dppo.checkpoint.checksums import CHECKSUMS, check_folder
from megatron_dppo.checkpoint.hf_side_files import CONFIG
from megatron_dppo.errors import UserError, file_errors, listed, of_file
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.names import Block, Shape

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WEIGHTS = ".safetensors"
_RECOMPUTED = re.compile(r"(.+\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Buffers that older checkpoints hold and no model reads: the rotary frequencies follow from config.json."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def converted(name: str, tensor: torch.Tensor, dtype: torch.dtype, *, allow_inf: bool = False) -> torch.Tensor:
    """`tensor` in another type. `UserError` names it where a finite number becomes inf there (float16 ends at 65504),
    unless `allow_inf`."""
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    if not allow_inf and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        lost = int((result.isinf() & tensor.isfinite()).sum())
        if lost:
            kind = str(dtype).removeprefix("torch.")
            raise UserError(
                f"{name} has {lost:,} numbers of {tensor.numel():,} that are inf as {kind} (the largest is "
                f"{tensor[tensor.isfinite()].abs().max():.4g}, the type ends at "
                f"{torch.finfo(dtype).max:.4g}); use bfloat16 or float32"
            )
    return result


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    shape: Shape
    dtype: torch.dtype


def most_common_dtype(tensors: Iterable[StoredTensor]) -> torch.dtype:
    """The type of most of the numbers."""
    numbers: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        numbers[tensor.dtype] += prod(tensor.shape)
    return numbers.most_common(1)[0][0]


_LISTED = 5


def refuse_tensors(where: object, faults: Mapping[str, Sequence[str]], why: str) -> None:
    """`UserError` for the first of `faults` (what is wrong, with which tensors) that has some: names a few of them."""
    for what, names in faults.items():
        if names:
            raise UserError(f"{where} {what} {listed(names, _LISTED)}; {why}")


class TensorFiles(Protocol):
    """The tensors of a model in files, read block by block."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    def read(self, name: str, block: Block) -> torch.Tensor: ...
    def close(self) -> None: ...


class HFFiles:
    """Every tensor of a checkpoint folder by name. Where the folder has checksums (those written here do), the files
    beside the weights are checked at once.

    A file is mapped into memory while it is read, and pages once touched count as this process's memory until it is
    unmapped: a file is therefore reopened after every `REOPEN_BYTES` read from it.
    """

    REOPEN_BYTES = 64 * 2**20
    dtypes = DTYPES
    """Of stored tensors, by the names of the format."""

    def __init__(self, folder: Path, *, only: str | None = None) -> None:
        """`only`: the one file of the folder that is read, in place of those with the model."""
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._open_file: Path | None = None
        self._handle: Any = None
        self._touched = 0
        require_unchanged(folder, which=lambda name: not name.endswith(WEIGHTS))
        for file, indexed in ({folder / only: None} if only else _files(folder)).items():
            self._add(file, indexed)
        self._stored = dict(self.tensors)
        """What the files hold; a subclass may offer other tensors, which it makes of these."""

    def check_weights(self, share: tuple[int, int] = (0, 1)) -> None:
        """`UserError` where the folder has checksums and a weight file is not what was written. Reads all of them, or
        (number, of) a share."""
        require_unchanged(self.folder, which=lambda name: name.endswith(WEIGHTS), share=share)

    def _add(self, file: Path, indexed: set[str] | None) -> None:
        with refuse_damaged(file), safe_open(file, "pt") as handle:
            names = set(handle.keys())
            for name in names:
                if _RECOMPUTED.fullmatch(name):
                    continue
                described = handle.get_slice(name)
                stored = described.get_dtype()
                if stored not in self.dtypes:
                    known = ", ".join(self.dtypes)
                    raise UserError(f"{file}: {name} is stored as {stored}; only {known} are supported")
                if name in self.tensors:
                    raise UserError(f"{file}: {name} is also stored in {self.tensors[name].file}")
                self.tensors[name] = StoredTensor(file, tuple(described.get_shape()), self.dtypes[stored])
        if indexed is not None:
            absent = sorted(indexed - names)
            if absent:
                raise UserError(f"{file} lacks {absent[0]}, which {INDEX} places there; fetch it again")

    @property
    def dtype(self) -> torch.dtype:
        """The type of most of the numbers."""
        return most_common_dtype(self.tensors.values())

    def read(self, name: str, block: Block) -> torch.Tensor:
        """A copy of one block, in the stored dtype."""
        stored = self._stored[name]
        if self._open_file != stored.file or self._touched > self.REOPEN_BYTES:
            self.close()
            self._handle = safe_open(stored.file, "pt")
            self._handle.__enter__()
            self._open_file = stored.file
        try:
            tensor = self._handle.get_slice(name)[tuple(slice(*span[:2]) for span in block)]
        except SafetensorError as error:
            raise UserError(f"{stored.file}: {name} cannot be read ({error}); fetch the file again") from None
        tensor = tensor[tuple(slice(None, None, *span[2:]) for span in block)]
        # Whole rows are touched where columns are cut out of them.
        self._touched += tensor.numel() * tensor.element_size() * max(1, stored.shape[-1] // max(1, tensor.shape[-1]))
        return tensor

    def close(self) -> None:
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._handle, self._open_file, self._touched = None, None, 0


def require_unchanged(
    folder: Path, *, mark: str = CONFIG, which: Callable[[str], bool] = lambda _: True, share: tuple[int, int] = (0, 1)
) -> None:
    """`check_folder` of a model's or an adapter's folder. Those that others wrote have no checksums."""
    try:
        check_folder(folder, mark=mark, which=which, share=share)
    except OSError as error:
        raise of_file(error, f"{error.filename} cannot be read: {error.strerror}") from None
    except UserError as damage:
        raise UserError(
            f"{damage}; fetch the folder again, or remove {CHECKSUMS} if you changed a file on purpose"
        ) from None


@contextmanager
def refuse_damaged(file: Path) -> Iterator[None]:
    """Around what opens a safetensors file and reads its header: `UserError` where it is damaged, and what
    `errors.of_file` makes of one that cannot be opened, which safetensors would call missing."""
    with file_errors(f"{file} cannot be read"):
        file.open("rb").close()
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is no intact safetensors file ({error}); it was cut off or overwritten: write or fetch it again"
        ) from None


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The weight files and, where there is an index, what it places in each."""
    index = folder / INDEX
    if index.is_file():
        placed = read_json_object(index).get("weight_map")
        if not isinstance(placed, dict):
            raise UserError(f"{index} is not a safetensors index: its weight_map is no object; fetch it again")
        files: dict[Path, set[str] | None] = {}
        for name, file in placed.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise UserError(f"{index} places {name} outside the folder, in {file!r}")
            entry = files.setdefault(folder / file, set())
            assert entry is not None
            entry.add(name)
        for file_path in files:
            if not os.path.isfile(file_path):  # Path.is_file raises for a name that no file system takes
                raise UserError(f"{file_path} is missing, but {INDEX} names it; fetch the checkpoint again")
        if (folder / SINGLE).is_file() and folder / SINGLE not in files:
            raise UserError(
                f"{folder} has both {SINGLE}, which transformers reads, and {INDEX}, which names other files; remove "
                "the one that is not meant"
            )
        return files
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    others = sorted(p.name for p in folder.glob("*.bin"))
    hint = f" ({others[0]} is a pickle and is not read; convert it to safetensors)" if others else ""
    raise UserError(f"{folder} has no weights: neither {SINGLE} nor {INDEX} is there{hint}")
