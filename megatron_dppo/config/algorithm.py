"""Which objective is trained."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_dppo.algorithm import presets
from megatron_dppo.algorithm.advantage import Baseline
from megatron_dppo.algorithm.aggregation import Aggregation
from megatron_dppo.algorithm.preset import Preset
from megatron_dppo.config_base import ConfigModel


class AlgorithmConfig(ConfigModel):
    """A row of the preset table, and any field of it overridden. See docs/algorithms.md."""

    preset: str = "dppo-binary-tv"
    """Name of the preset; it fixes the trust region and its anchor."""
    constants: str | None = None
    """Published set of constants ("appendix-d", "appendix-f", ...); the preset's first when absent."""
    overrides: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Fields of the preset to change, e.g. `algorithm.overrides.threshold_negative=0.2`."""
    baseline: Baseline = Baseline.MEAN
    """What is subtracted from a reward: the mean of its group, of the others of its group, or nothing."""
    divide_by_std: bool = False
    """Divide advantages by the group's standard deviation (the paper does not)."""
    overlong_filter: bool = False
    """Leave answers that were cut at `rollout.max_response_tokens` out of the loss, and of an environment the episodes
    that it did not end. Their rewards still count in the baseline of their group."""
    normaliser: float | None = Field(default=None, gt=0)
    """L of the aggregation `seq-mean-token-sum-norm`, in tokens; `rollout.max_response_tokens` when absent."""

    @model_validator(mode="after")
    def _has_a_use(self) -> AlgorithmConfig:
        aggregation = self.resolve().aggregation
        if self.normaliser is not None and aggregation is not Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            raise ValueError(
                f"algorithm.normaliser={self.normaliser:g} has no effect: the aggregation is {aggregation}, not "
                f"{Aggregation.SEQ_MEAN_TOKEN_SUM_NORM}; set it to null"
            )
        return self

    def resolve(self) -> Preset:
        """The preset with the overrides applied. Raises PresetError (a ValueError) with the reason."""
        return presets.get(self.preset, constants=self.constants, **self.overrides)
