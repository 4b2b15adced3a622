"""What a Hugging Face model folder holds beside the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from megatron_dppo.checkpoint.atomic import write_synced
from megatron_dppo.errors import UserError

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
)


def check_side_files(source: Path | None) -> None:
    """`UserError` where the folder a model came from no longer has its config."""
    if source is None or not (source / CONFIG).is_file():
        raise UserError(f"{source} no longer has the {CONFIG} and tokenizer that go with the weights; put it back")


def copy_side_files(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy tokenizer, chat template and generation config as they are, and the config with its dtype brought up to
    date, last: a folder without it is no model."""
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    raw = json.loads((source / CONFIG).read_text())
    raw["torch_dtype" if "torch_dtype" in raw else "dtype"] = str(dtype).removeprefix("torch.")
    write_synced(target / CONFIG, json.dumps(raw, indent=2, ensure_ascii=False) + "\n")
