"""The distribution that tokens are drawn from, and what may not change it.

The trainer recomputes `log pi` as the log-softmax of logits / temperature over the whole vocabulary. `log mu` is
comparable only if the engine drew from the same distribution, so anything else that moves or removes probability is
refused for training (paper, Section 4; top-p or penalties would enter the ratio pi / mu as if the policy had changed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.errors import UserError

LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises positive temperatures to this."""


def refuse_other_distributions(params: Any, neutral: Mapping[str, Any]) -> None:
    """Raise `UserError` unless tokens drawn under `params` follow softmax(logits / temperature) and nothing else.

    neutral   fields of `params` that change the distribution, with the value at which they do not
    """
    if params.temperature < LOWEST_TEMPERATURE:
        raise UserError(
            f"temperature={params.temperature} cannot be used for training rollouts: "
            f"log mu of a greedy draw is not the policy's; use at least {LOWEST_TEMPERATURE}"
        )
    for name, value in neutral.items():
        given = getattr(params, name)
        if given != value and not (given in ([], {}) and value is None):
            raise UserError(
                f"{name}={given!r} changes the sampling distribution and cannot be used for training rollouts: the "
                f"recorded log mu would not be the policy's; leave it at {value!r} (evaluation may use it)"
            )
