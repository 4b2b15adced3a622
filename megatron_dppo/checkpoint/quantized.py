"""Checkpoints whose weights are stored in few bits: which class reads them as plain numbers, by config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.checkpoint.block_scaled import BlockScaledFiles
from megatron_dppo.checkpoint.hf_files import HFFiles
from megatron_dppo.checkpoint.mxfp4 import Mxfp4Files
from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object

FIELD = "quantization_config"
_READERS: dict[str, type[BlockScaledFiles | Mxfp4Files]] = {"fp8": BlockScaledFiles, "mxfp4": Mxfp4Files}
_NAMES_MODULES = ("modules_to_not_convert", "ignored_layers")
"""Whose weights are plain; the files say so too."""


def is_quantized(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says that its weights are not plain."""
    return bool(raw.get(FIELD))


def reader(raw: Mapping[str, Any], where: Path) -> type[HFFiles]:
    """What reads the weights of a quantised folder; `UserError` names what of the scheme `where` is not known."""
    scheme = raw[FIELD]
    if not isinstance(scheme, dict):
        raise UserError(f"{where}: {FIELD} is {scheme!r:.80}, it must be an object")
    method = scheme.get("quant_method")
    found = _READERS.get(method) if isinstance(method, str) else None
    if found is None:
        known = " and ".join(f"{name} ({one.described})" for name, one in _READERS.items())
        raise UserError(
            f"{where}: {FIELD}.quant_method is {method!r:.80}, only {known} can be read; fetch the model's plain "
            "weights"
        )
    for name, values in found.scheme.items():
        if (value := scheme.get(name)) not in values:
            raise UserError(
                f"{where}: {FIELD}.{name} is {value!r:.80}, only {values[0]!r} can be read ({found.described}); fetch "
                "the model's plain weights"
            )
    if unknown := sorted(set(scheme) - {"quant_method", *found.scheme, *_NAMES_MODULES}):
        raise UserError(f"{where}: {FIELD}.{unknown[0]} is not known; fetch the model's plain weights")
    return found


def open_files(folder: Path) -> HFFiles:
    """The weights of a folder, plain or in few bits, as its config.json says."""
    raw = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    return reader(raw, folder / "config.json")(folder) if is_quantized(raw) else HFFiles(folder)
