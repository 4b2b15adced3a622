"""A model's shapes with fewer layers: a folder that has everything but weights."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import torch

from megatron_dppo.checkpoint.atomic import whole_folder, write_synced
from megatron_dppo.checkpoint.hf_side_files import CONFIG, copy_side_files
from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.hf_config import load_hf_config


def with_layers(model: Path, layers: int, folder: Path) -> Path:
    """`folder`, holding config.json of the first `layers` layers of `model` and its tokenizer. Ranks that come at the
    same time wait for the first. Raises UserError."""
    whole = load_hf_config(model)
    if not 1 <= layers <= whole.layers:
        raise UserError(f"--layers {layers}: {model} has 1 to {whole.layers}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                with whole_folder(folder) as partial:
                    copy_side_files(model, partial, getattr(whole.config, "dtype", None) or torch.float32)
                    raw = read_json_object(partial / CONFIG) | {"num_hidden_layers": layers}
                    if raw.get("layer_types"):
                        raw["layer_types"] = raw["layer_types"][:layers]
                    write_synced(partial / CONFIG, json.dumps(raw, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; choose another -o folder") from None
    return folder
