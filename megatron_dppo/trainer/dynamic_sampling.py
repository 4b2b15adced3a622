"""Groups whose rewards are all equal are replaced by those of other prompts (DAPO, arXiv 2503.14476, Section 3.2).

```
the step's prompts ─► groups ─► rewards differ? ── yes ─► kept, in order, up to the step's number
                        ▲              └─ no ─► dropped; others are asked for, for so many rounds at most
other prompts ──────────┘
```
Which prompts come in their place depends on the step and its own answers alone, never on earlier steps: a resumed run,
and one that samples ahead, asks for the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dppo.rollout.stored import RolloutHandle
from megatron_dppo.tasks.prompt_set import PromptSet
from megatron_dppo.tasks.task import Prompt, Rewards

RESERVE_EPOCH = 1 << 40
"""Epochs from here on are those of the prompts that take another's place. No run gets there by its steps."""


@dataclass(frozen=True)
class Groups:
    """Answers to some prompts, `samples` to each in turn; every group is an object of the store of its own."""

    prompts: Sequence[Prompt]
    handle: RolloutHandle
    responses: Sequence[np.ndarray]
    """Token ids of each answer."""
    rewards: Rewards

    @property
    def samples(self) -> int:
        return len(self.responses) // len(self.prompts)

    def select(self, numbers: Sequence[int]) -> Groups:
        """The groups of these numbers, in this order."""
        rows = [number * self.samples + sample for number in numbers for sample in range(self.samples)]
        return Groups(
            [self.prompts[number] for number in numbers],
            self.handle.select(numbers),
            [self.responses[row] for row in rows],
            self.rewards.select(rows),
        )

    @staticmethod
    def concatenate(parts: Sequence[Groups]) -> Groups:
        return Groups(
            [prompt for part in parts for prompt in part.prompts],
            RolloutHandle.concatenate([part.handle for part in parts]),
            [response for part in parts for response in part.responses],
            Rewards.concatenate([part.rewards for part in parts]),
        )


@dataclass(frozen=True)
class Drawn:
    """What a step trains on, and what it took."""

    kept: Groups
    dropped: RolloutHandle | None
    """Of the groups that nobody trains on."""
    rewards: Rewards
    """Of all answers, the dropped ones too: what the policy can do."""
    metrics: dict[str, float]


def reserve(task: PromptSet, step: int, rounds: int, count: int) -> Callable[[int, int], list[Prompt]]:
    """`(start, count) -> prompts`: of the prompts for the places of others in `step`, `rounds * count` at most."""
    first = RESERVE_EPOCH * task.epoch_size + step * rounds * count
    return lambda start, wanted: task.prompts(first + start, wanted)


def draw(
    prompts: Sequence[Prompt],
    others: Callable[[int, int], Sequence[Prompt]],
    ask: Callable[[Sequence[Prompt], Sequence[Prompt]], Groups],
    *,
    rounds: int,
) -> Drawn:
    """As many groups as there are `prompts`, with rewards that differ, as far as `rounds` further rounds find them.

    others   prompts at positions `start .. start + count` of those that may come instead
    ask      samples and scores `(prompts, all prompts of the step that were asked before)`
    rounds   A round asks for as many prompts as are missing, divided by the fraction of groups that differed so far,
             and for no more than the step has. What is missing after the last is filled up with equal groups.
    """
    wanted = len(prompts)
    drawn, asked_for = [ask(prompts, ())], list(prompts)
    differ = drawn[0].rewards.differ(drawn[0].samples)
    made = 0
    while differ.sum() < wanted and made < rounds:
        count = min(wanted, math.ceil((wanted - differ.sum()) / max(differ.mean(), 1 / wanted)))
        more = others(len(asked_for) - wanted, count)
        drawn.append(ask(more, asked_for))
        asked_for += more
        differ = np.concatenate([differ, drawn[-1].rewards.differ(drawn[-1].samples)])
        made += 1
    everything = Groups.concatenate(drawn)
    kept = [int(n) for n in np.flatnonzero(differ)[:wanted]]
    filled = [int(n) for n in np.flatnonzero(~differ)[: wanted - len(kept)]]
    dropped = sorted(set(range(len(differ))) - set(kept) - set(filled))
    lost = everything.handle.select(dropped) if dropped else None
    metrics = {
        "rounds": made,
        "sampled_groups": len(differ),
        "kept_groups": len(kept),
        "filled_groups": len(filled),
        "dropped_groups": len(dropped),
        "wasted_tokens": 0 if lost is None else lost.trained.sum(),
    }
    return Drawn(
        everything.select([*kept, *filled]),
        lost,
        everything.rewards,
        {f"dynamic_sampling/{name}": float(value) for name, value in metrics.items()},
    )
