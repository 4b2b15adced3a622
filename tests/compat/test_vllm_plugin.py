"""vLLM's processes end with whoever started them, and hear all of their workers."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

STARTER = """
import multiprocessing, os, time
from megatron_dppo.compat.vllm_plugin import end_with_parent
fork = multiprocessing.get_context("fork")
def worker():
    end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)
def core():
    end_with_parent()
    end_with_parent()
    print(os.getpid(), flush=True)
    fork.Process(target=worker).start()
    time.sleep(600)
fork.Process(target=core).start()
time.sleep(600)
"""


def test_a_core_and_a_worker_that_it_forks_end_with_a_starter_that_is_killed() -> None:
    """The worker has the core's memory, but not its threads."""
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    processes = [psutil.Process(int(starter.stdout.readline())) for _ in range(2)]
    try:
        starter.kill()
        _, left = psutil.wait_procs(processes, timeout=300)
        assert not left
    finally:
        for process in (starter, *psutil.wait_procs(processes, timeout=0)[1]):
            process.kill()
        starter.wait()
        starter.stdout.close()


class Answers(queue.Queue[Any]):
    """Of one worker."""

    def dequeue(self, timeout: float | None) -> Any:
        try:
            return self.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None


def test_an_answer_is_one_to_the_question_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of three workers has failed the next call gets nothing of what the others said then."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    from megatron_dppo.compat import vllm_plugin

    monkeypatch.setattr(MultiprocExecutor, "collective_rpc", MultiprocExecutor.collective_rpc)
    monkeypatch.setattr(vllm_plugin, "_OTHERS_S", 0.1)
    for _ in range(2):
        vllm_plugin.hear_all_workers()
    workers = [Answers() for _ in range(3)]

    def asked(question: tuple[str, tuple[Any, ...], Any, int | None]) -> None:
        method, fails, _, alone = question
        for number, worker in enumerate(workers):
            status = WorkerProc.ResponseStatus.FAILURE if number in fails else WorkerProc.ResponseStatus.SUCCESS
            if alone in (None, number) and "silent" not in fails[:number]:
                worker.put((status, f"{method} {number}"))

    executor: Any = object.__new__(MultiprocExecutor)
    executor.is_failed, executor.futures_queue, executor.response_mqs = False, deque(), workers
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=asked)
    for fails, first in (((0, 1, 2), 0), ((1,), 1), ((2,), 2)):
        with pytest.raises(RuntimeError, match=f"'receive {first}'"):
            executor.collective_rpc("receive", args=fails)
        assert executor.collective_rpc("begin") == ["begin 0", "begin 1", "begin 2"]
    assert executor.collective_rpc("draw", unique_reply_rank=1) == "draw 1"
    assert executor.collective_rpc("draw", non_block=True).result() == ["draw 0", "draw 1", "draw 2"]
    with pytest.raises(TimeoutError, match="RPC call to draw timed out"):
        executor.collective_rpc("draw", timeout=0.1, args=("silent",))
    assert not any(worker.qsize() for worker in workers)
    with pytest.raises(RuntimeError, match="'receive 0'"):
        executor.collective_rpc("receive", args=(0, "silent"))
    for worker in workers[1:]:
        worker.put((WorkerProc.ResponseStatus.SUCCESS, "receive, late"))
    with pytest.raises(RuntimeError, match="Executor failed"):
        executor.collective_rpc("begin")
