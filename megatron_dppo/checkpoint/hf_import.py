"""Hugging Face weights into a sharded Megatron-Core model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, isnan, prod
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.checkpoint.first_rank import raise_from_any
from megatron_dppo.checkpoint.hf_files import HFFiles, TensorFiles, converted, refuse_tensors
from megatron_dppo.checkpoint.weight_layout import extent
from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import owned_parameters

_COMPARED_ROWS = 8192


def load_hf_weights(
    models: Sequence[torch.nn.Module],
    model: HFConfig,
    groups: ProcessGroupCollection,
    path: Path | str | None = None,
) -> None:
    """Fill every parameter of this rank's chunks from the safetensors files in `path` (default: `model.path`).

    Each rank reads only the blocks it holds, so its memory grows by one block beside its shard. Files may hold one
    tensor per expert or transformers 5's stacked ones. What is stored is cast to the parameter's dtype; where a number
    is NaN or inf, or becomes inf there (float16), `UserError` names the tensor. Rows of the padded vocabulary become
    zero. Every rank checks the headers of all files itself. Collective over all ranks.

    `UserError` lists what is missing, unused or of the wrong shape before anything is read; afterwards every parameter
    of the model and every stored tensor has been used exactly once, but for those that are only carried
    (`HFConfig.carries`).
    """
    folder = Path(path) if path is not None else model.path
    if folder is None:
        raise UserError("the model has no folder to load weights from; give one")
    files = HFFiles(folder)
    stacked = stores_stacked_experts(files, model)
    check_tensors(files, model, stacked)
    check_tokenizer(folder, model)
    fill_parameters(models, model, groups, files, stacked=stacked)


def fill_parameters(
    models: Sequence[torch.nn.Module],
    model: HFConfig,
    groups: ProcessGroupCollection,
    files: TensorFiles,
    *,
    stacked: bool = False,
    progress: Callable[[int, int], None] | None = None,
    allow_inf: bool = False,
) -> None:
    """`load_hf_weights` from files that are known to hold every tensor of the model and no other. Where a folder of
    Hugging Face's has checksums the ranks first read a share of its files each and agree that these hold.
    `progress(done, of)` counts parameters; with `allow_inf` numbers may be inf, or become it."""
    if isinstance(files, HFFiles):
        raise_from_any(lambda: files.check_weights((dist.get_rank(), dist.get_world_size())))
    owned = list(owned_parameters(models, model, groups, stacked=stacked))
    order = sorted(owned, key=lambda o: o.pieces[0].hf_name if o.pieces else "")

    @torch.no_grad()
    def fill() -> None:
        for done, item in enumerate(order, start=1):
            if tuple(item.parameter.shape) != item.shape:
                raise RuntimeError(f"{item.name} is {tuple(item.parameter.shape)} on this rank, not {item.shape}")
            covered = sum(prod(extent(piece.local)) for piece in item.pieces)
            if covered != item.parameter.numel():
                item.parameter.zero_()  # rows of the padded vocabulary
            for piece in item.pieces:
                target = item.parameter[tuple(slice(*extent) for extent in piece.local)]
                block = piece.from_tensor(files.read(piece.hf_name, piece.source))
                _check_finite(piece.hf_name, block, allow_inf)
                target.copy_(converted(piece.hf_name, block, target.dtype, allow_inf=allow_inf))
            if progress:
                progress(done, len(order))

    raise_from_any(fill)
    files.close()


def _check_finite(name: str, block: torch.Tensor, allow_inf: bool) -> None:
    """Engines would start and fail, one after another, and training skip its steps: neither can name the tensor."""
    if not block.numel():
        return
    least, greatest = (float(end) for end in block.aminmax())  # NaN if one is
    if isnan(least) or not (allow_inf or isfinite(greatest - least)):
        raise UserError(f"{name} has numbers that are {'NaN' if isnan(least) else 'infinite'}; get the file anew")


def check_tensors(files: HFFiles, model: HFConfig, stacked: bool) -> None:
    """Names and shapes in the files against the model's table: a bijection, or `UserError`."""
    expected = model.stacked_tensors if stacked else model.tensors
    stored = dict(files.tensors)
    ends = (model.family.ends[f"{end}.weight"] for end in ("output_layer", "embedding.word_embeddings"))
    head, embedding = (next(iter(end.sources(model))) for end in ends)
    if model.tied and head in stored:
        expected = expected | {head: expected[embedding]}
    missing = [name for name in expected if name not in stored]
    unused = sorted(name for name in stored if name not in expected and not model.carries(name))
    wrong = [
        f"{name} {stored[name].shape} in place of {shape}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    faults = {"lacks": missing, "has tensors of the wrong shape:": wrong, "has unused tensors:": unused}
    refuse_tensors(files.folder, faults, "it does not match its config.json")
    if model.tied and head in stored:
        _check_tied(files, head, embedding)


def _check_tied(files: HFFiles, head: str, embedding: str) -> None:
    """A tied model may store its one matrix under both names. `UserError` where they differ: transformers would then
    take them for two."""
    rows, columns = files.tensors[head].shape
    for start in range(0, rows, _COMPARED_ROWS):
        block = ((start, min(start + _COMPARED_ROWS, rows)), (0, columns))
        differs = (files.read(head, block) != files.read(embedding, block)).any(dim=1)
        if differs.any():
            row = start + int(differs.int().argmax())
            files.close()
            raise UserError(
                f"{files.folder} stores {head}, which differs from {embedding} in row {row}, although config.json "
                "says tie_word_embeddings: true; set it to false to use the stored output layer, or remove the tensor"
            )
    files.close()


def check_tokenizer(folder: Path, model: HFConfig) -> None:
    """`UserError` where the tokenizer knows ids that the embedding has no row for."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    content = read_json_object(file)
    try:
        vocabulary = content.get("model", {}).get("vocab", {})
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        largest = max([*ids, *(t["id"] for t in content.get("added_tokens") or [])], default=-1)
        beyond = largest >= model.vocab_size
    except (AttributeError, TypeError, KeyError) as error:
        raise UserError(f"{file} is no tokenizer ({error!r}); copy it again from where the model came from") from None
    if beyond:
        raise UserError(
            f"{file} has token ids up to {largest}, but config.json says vocab_size {model.vocab_size}: the embedding "
            "has no row for them"
        )


def stores_stacked_experts(files: HFFiles, model: HFConfig) -> bool:
    """All experts of a layer in one tensor, as transformers 5 holds them in memory, in place of one file entry each."""
    return any(name in files.tensors for name in model.stacked_tensors if name not in model.tensors)
