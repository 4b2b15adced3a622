"""vLLM's processes end with whoever started them."""

from __future__ import annotations

import subprocess
import sys

import psutil

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
