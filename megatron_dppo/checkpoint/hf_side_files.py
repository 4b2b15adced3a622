"""What a Hugging Face model folder holds beside the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from megatron_dppo.checkpoint.atomic import write_synced
from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.family import text_fields

CONFIG = "config.json"
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def _inside(source: Path, name: str) -> Path:
    """The file behind `source/name`. `UserError` for a link that leads out of the folder: whoever made the folder would
    choose which of our files an export holds. The Hugging Face cache alone links to its `blobs` two folders above."""
    folder = source.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parents[1] / "blobs")
    try:
        file = (source / name).resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{source / name} is a link that leads nowhere ({error}); remove it") from None
    if not any(file.is_relative_to(place) for place in allowed):
        raise UserError(f"{source / name} is a link to {file}, outside the model's folder; put a copy in its place")
    return file


def check_side_files(source: Path | None) -> None:
    """`UserError` where the folder a model came from no longer has its config, or has links to files elsewhere."""
    if source is None or not (source / CONFIG).is_file():
        raise UserError(f"{source} no longer has the {CONFIG} and tokenizer that go with the weights; put it back")
    for name in (CONFIG, *_COPIED):
        _inside(source, name)


def copy_side_files(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy tokenizer, chat template and generation config as they are, and the config with its dtype brought up to
    date, last: a folder without it is no model."""
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(_inside(source, name), target / name)
    raw = read_json_object(_inside(source, CONFIG))
    decoder = text_fields(raw)
    for fields in (decoder, raw):
        for name in ("dtype", "torch_dtype"):
            if name in fields or (fields is decoder and name == "dtype" and "torch_dtype" not in fields):
                fields[name] = str(dtype).removeprefix("torch.")
    raw.pop("quantization_config", None)  # what is written is plain
    write_synced(target / CONFIG, json.dumps(raw, indent=2, ensure_ascii=False) + "\n")
