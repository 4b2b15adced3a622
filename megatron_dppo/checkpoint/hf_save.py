"""A Hugging Face checkpoint folder from a sharded Megatron-Core model."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dppo.checkpoint.atomic import check_target, require_room, write_synced
from megatron_dppo.checkpoint.carried import carried
from megatron_dppo.checkpoint.checksums import write_checksums
from megatron_dppo.checkpoint.first_rank import on_first_rank, write_on_first_rank
from megatron_dppo.checkpoint.hf_export import BUCKET_BYTES, ExportedTensor, weight_exporter
from megatron_dppo.checkpoint.hf_files import INDEX, SINGLE, converted
from megatron_dppo.checkpoint.hf_side_files import CONFIG, check_side_files, copy_side_files
from megatron_dppo.checkpoint.safetensors_stream import SafetensorsStream
from megatron_dppo.models.hf_config import HFConfig

SHARD_BYTES = 5 * 10**9


def save_hf_checkpoint(
    path: Path | str,
    models: Sequence[torch.nn.Module],
    model: HFConfig,
    groups: ProcessGroupCollection,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    allow_inf: bool = False,
    beside: Path | None = None,
    exact: Collection[str] = (),
) -> None:
    """Write the model as transformers reads it: safetensors (several files and an index beyond `shard_bytes`),
    config, tokenizer, chat template and generation config, the latter copied from `model.path`, and checksums of all.
    What the folder `beside` (default `model.path`) holds beside the model (`HFConfig.carries`) is copied bit by bit.
    Tensors of `exact` keep the type of their parameters.

    A collective over all ranks; rank 0 writes, with two buckets of memory beside its shard. The same weights always
    give the same bytes. The folder appears whole, by a rename at the end, or not at all; every rank then raises the
    same `UserError`; so they do for a number that becomes inf in `dtype`, unless `allow_inf`. `progress(bytes, of)` is
    called on rank 0.
    """
    target = Path(path)
    exporter = weight_exporter(models, model, groups, in_files=True)
    kept = {*model.float32_tensors, *exact}
    tensors = [
        ExportedTensor(t.name, t.shape, t.dtype if t.name in kept else dtype or t.dtype) for t in exporter.tensors
    ]
    stored = [*_stored(tensors, model)]
    more = on_first_rank(lambda: carried(model, beside or model.path).tensors)
    on_first_rank(lambda: _check_writable(target, [*stored, *more], model, overwrite))

    stream = exporter.stream(bucket_bytes=bucket_bytes)

    def write(folder: Path) -> None:
        assert model.path is not None
        together = chain(stream, carried(model, beside or model.path).stream())
        shards = _shards([*stored, *more], shard_bytes)
        digests = _write_weights(folder, together, shards, progress, allow_inf)
        copy_side_files(model.path, folder, tensors[0].dtype)
        write_checksums(folder, mark=CONFIG, known=digests)

    write_on_first_rank(target, stream, write, overwrite=overwrite)


def _stored(tensors: list[ExportedTensor], model: HFConfig) -> Iterator[ExportedTensor]:
    """What a file has of them: the experts of a layer as one tensor, in a family that stores them so."""
    for stack, parts in groupby(tensors, key=lambda tensor: model.written_in.get(tensor.name)):
        if stack is None:
            yield from parts
        else:
            yield replace(next(parts), name=stack, shape=model.stacked_tensors[stack])


def _check_writable(target: Path, tensors: list[ExportedTensor], model: HFConfig, overwrite: bool) -> None:
    check_target(target, overwrite=overwrite)
    check_side_files(model.path)
    require_room(target, sum(t.nbytes for t in tensors))


def _shards(tensors: list[ExportedTensor], shard_bytes: int) -> list[list[ExportedTensor]]:
    shards: list[list[ExportedTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.nbytes for t in shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _write_weights(
    folder: Path,
    stream: Iterator[tuple[str, torch.Tensor | None]],
    shards: list[list[ExportedTensor]],
    progress: Callable[[int, int], None] | None,
    allow_inf: bool,
) -> dict[str, str]:
    """The digests of the files, by name."""
    digests: dict[str, str] = {}
    total, done = sum(t.nbytes for shard in shards for t in shard), 0
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    for file, shard in zip(names, shards, strict=True):
        with SafetensorsStream(folder / file, shard) as writer:
            for expected in shard:
                end = done + expected.nbytes
                while True:  # a stack comes as the matrices of its experts
                    name, tensor = next(stream)
                    assert tensor is not None
                    part = converted(name, tensor, expected.dtype, allow_inf=allow_inf)
                    writer.write(expected.name, part)
                    done += part.nbytes
                    if progress:
                        progress(done, total)
                    if done >= end:
                        break
        digests[file] = writer.digest
    if len(shards) > 1:
        placed = {tensor.name: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        write_synced(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return digests
