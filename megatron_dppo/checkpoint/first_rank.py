"""What one rank does or finds alone and all ranks have to know of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_dppo.errors import UserError, of_file


def on_first_rank[T](call: Callable[[], T]) -> T:
    """`call` on rank 0 alone; on every rank its result, or what `of_file` makes of the UserError or OSError that it
    raised (not every error of a library can be sent). Collective: a broadcast."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = call()
        except (UserError, OSError) as error:
            outcome[1] = of_file(error, str(error))
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def raise_from_any(call: Callable[[], None]) -> None:
    """`call` on every rank; the UserError of the first rank that has one, on every rank. Collective: an all-gather."""
    found: list[str | None] = [None] * dist.get_world_size()
    problem = None
    try:
        call()
    except UserError as error:
        problem = str(error)
    dist.all_gather_object(found, problem)
    for one in found:
        if one is not None:
            raise UserError(one)


def raise_everywhere(problem: UserError | OSError | None) -> None:
    """On every rank the `problem` of rank 0. Collective: a broadcast."""

    def fail() -> None:
        if problem:
            raise problem

    on_first_rank(fail)
