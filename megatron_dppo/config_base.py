"""The base of every configuration class."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PrivateAttr


class ConfigModel(BaseModel):
    """Frozen, typed, keyword-only; unknown keys are errors. A docstring under each field says what it means."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    _from_environment: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)
    """Of the outermost section: the place of each value that holds one of the environment's, and what was written there
    (`${oc.env:NAME}`). See `config.load.recorded`."""
