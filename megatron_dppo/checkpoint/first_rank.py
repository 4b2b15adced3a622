"""What one rank does or finds alone and all ranks have to know of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_dppo.checkpoint.atomic import whole_folder
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


def write_on_first_rank(
    target: Path, stream: Iterator[object], write: Callable[[Path], None], *, overwrite: bool
) -> None:
    """A folder that `write` fills on rank 0 with what comes in `stream`, a collective; whole, or not at all, which
    every rank then raises alike. All iterate to the stream's end: the others send, also where rank 0
    cannot write; but a signal that ends rank 0 ends it at once."""

    def fill() -> None:
        try:
            with whole_folder(target, overwrite=overwrite) as folder:
                write(folder)
        except (OSError, UserError) as error:
            deque(stream, maxlen=0)
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise of_file(error, f"cannot write {target}: {reason}; nothing was left there") from None

    if dist.get_rank() != 0:
        deque(stream, maxlen=0)
    on_first_rank(fill)
