"""The `vllm.general_plugins` entry point: vLLM calls it in every process that it starts."""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from typing import Any

from torch.distributed.constants import default_pg_timeout

from megatron_dppo.launch.network import bound_store

_HANDLERS = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
_THEIRS = _HANDLERS["tcp"]
BACKEND = "megatron_dppo"
"""Our name to vLLM, as a plugin and as a weight-transfer backend."""
_RECEIVER = "megatron_dppo.rollout.vllm.receiver", "BucketReceiver"
"""Imported when vLLM asks for it."""
_HELD: list[socket.socket] = []
"""Bound to the ports that are kept, for as long as this process lives."""
_WATCH = "ends with its parent"
_OTHERS_S = 30.0
"""For the answers of all of an engine's other workers when one has failed."""


def register() -> None:
    """Prepare this vLLM process for our rollout engine. Idempotent, since vLLM may call it again.

    Names our weight-transfer backend, lets torch's store listen on one address and its port be kept, lets an engine
    hear all of its workers, and on a CPU lets router replay see the experts that the kernels choose, workers share them
    out, experts have any size and heads any form; on a GPU vLLM does that itself.

    A process that has imported vLLM walks 700,000 objects in its last garbage collection: two to five seconds in which
    the engine's core, its work done, is waited for and then killed. Frozen objects are not walked.

    A core does not notice that whoever started it was killed: it would keep its memory, a GPU's too, for ever.
    """
    atexit.register(gc.freeze)
    end_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from megatron_dppo.compat.vllm_cpu import mend_expert_choice, mend_expert_sizes, mend_rotation, on_cpu

    with suppress(ValueError):  # the factory knows the name already
        WeightTransferEngineFactory.register_engine(BACKEND, *_RECEIVER)
    bind_stores()
    keep_ports()
    hear_all_workers()
    if on_cpu():
        mend_expert_choice()
        mend_expert_sizes()
        mend_rotation()


def end_with_parent() -> None:
    """End this process when the one that started it has ended. By a thread, which a forked child lacks and starts for
    itself: the kernel's own signal would come already when the thread ends that started this process. Idempotent."""
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


def bind_stores() -> None:
    """Let torch's stores listen on the address that they are asked for, from now on in this process. Idempotent.

    vLLM's workers meet at `tcp://127.0.0.1:PORT`, or at a node's address; the store that torch makes there for the
    first of them listens on all interfaces whatever that says, and torch has no option for it.
    """
    _HANDLERS["tcp"] = _bound


def keep_ports() -> None:
    """Let vLLM hold the port at which an engine's workers will meet, from now on in this process. Idempotent.

    It finds a free one and lets go of it; seconds later the first worker listens there, if no other process of a busy
    machine was given it meanwhile. A socket that is bound and does not listen keeps others away, but not a store of
    ours (`bound_store` allows a second one there).
    """
    from vllm.v1.executor import multiproc_executor

    stock: Callable[[], int] = multiproc_executor.get_open_port
    if hasattr(stock, "__wrapped__"):
        return

    @wraps(stock)
    def get_open_port() -> int:
        while True:
            port, held = stock(), socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind(("", port))
            except OSError:  # taken since it was found
                held.close()
            else:
                _HELD.append(held)
                return port

    multiproc_executor.get_open_port = get_open_port


def hear_all_workers() -> None:
    """Have vLLM read what each worker of an engine answers, from now on in this process. Idempotent.

    It stops at the first that failed, and takes what the others said for their answers to its next question: an engine
    of several workers whose weight sync had to be given up failed in the one that followed too. An engine one of whose
    others does not answer in time either is asked nothing more.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    executor: Any = MultiprocExecutor
    stock, well = executor.collective_rpc, WorkerProc.ResponseStatus.SUCCESS
    if hasattr(stock, "__wrapped__"):
        return

    def answers(engine: Any, method: Any, deadline: float | None) -> list[Any]:
        found, failed = [], None
        for queue in engine.response_mqs:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                status, answer = queue.dequeue(timeout=left)
            except Exception as error:
                if failed is not None:  # told below; whatever comes on this queue is no answer to another question
                    engine.is_failed = True
                    continue
                if isinstance(error, TimeoutError):
                    raise TimeoutError(f"RPC call to {method} timed out.") from error
                raise
            found.append(answer)
            if status != well and failed is None:
                failed, deadline = answer, time.monotonic() + _OTHERS_S
        if failed is not None:
            raise RuntimeError(f"Worker failed with error '{failed}', its stack trace above has the root cause")
        return found

    @wraps(stock)
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: Any = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: Any = False,
        **to: Any,
    ) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        future = stock(self, method, timeout, args, kwargs, True, **to)
        if all(option is None for option in to.values()):  # else one worker answers
            future.get_response = partial(answers, self, method, deadline)
        return future if non_block else future.result()

    executor.collective_rpc = collective_rpc


def _bound(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[Any]:
    parts = urllib.parse.urlparse(url)
    asked = dict(urllib.parse.parse_qsl(parts.query))
    if asked.get("rank") == "0" and parts.hostname and parts.port:
        # Nobody but the worker itself looks for a store of one.
        port = 0 if asked["world_size"] == "1" else parts.port
        try:
            store = bound_store(parts.hostname, port, timeout=timeout)
        except OSError:  # the address of something before this machine
            pass
        else:
            yield store, 0, int(asked["world_size"])
            return
    yield from _THEIRS(url, timeout=timeout, **options)
