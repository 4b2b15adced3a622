"""Reading the JSON files that come with a model, a checkpoint or an adapter: from outside, so from anybody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dppo.errors import UserError, file_errors


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in `file`. `UserError` names the file and the reason where it cannot be read, is no JSON (not UTF-8,
    nested beyond what Python can follow) or holds something else than an object; `SystemFault` as of
    `errors.of_file`."""
    with file_errors(f"{file} cannot be read"):
        return json_object(file.read_bytes(), file)


def json_object(text: bytes, where: Path) -> dict[str, Any]:
    """The same of bytes that were read from `where`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # the decoding of characters fails with a ValueError too
        raise UserError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} must hold a JSON object, found a {type(value).__name__}")
    return value
