"""Processes outside the sandbox, frames, and answers that nobody asked for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dppo.errors import UserError, raise_cause
from megatron_dppo.tasks.rewards import pool as pools
from megatron_dppo.tasks.rewards.config import PythonReward, VerifierReward
from megatron_dppo.tasks.rewards.gym import GymVerifier
from megatron_dppo.tasks.rewards.math import MathVerifier
from megatron_dppo.tasks.rewards.pool import CustomVerifier, LocalVerifierPool, TimedVerifier, read_verdict
from megatron_dppo.tasks.rewards.verdict import Answered, Verdict
from megatron_dppo.tasks.workers import sandbox
from megatron_dppo.tasks.workers.calls import HEADER, Asked, Call, Channel, Closed, Hosted, Outcome
from megatron_dppo.tasks.workers.sandbox import clean_environment
from megatron_dppo.tasks.workers.workers import Workers

HERE = "tests.tasks.workers.test_workers"
_calls: list[str] = []


def rights(*, answer: str, **_: Any) -> float:
    """Does what only a function outside of the sandbox can."""
    if answer == "count":
        _calls.append(answer)
        return len(_calls)
    if answer == "child":
        return len(subprocess.run(["echo", "four"], capture_output=True).stdout)
    if answer == "named":
        return float(os.environ["MY_KEY"])
    if answer == "others":
        return float("MY_TOKEN" in os.environ)
    name, _, path = answer.partition(" ")
    if name == "wait":
        while not Path(path).exists():
            time.sleep(0.01)
        return 7
    if name == "make":
        Path(path).touch()
        return 8
    if answer == "daemon":
        code = "import os, sys, time; os.setsid(); os.fork() and os._exit(0); time.sleep(3600)"
        subprocess.Popen([sys.executable, "-c", code, "of test_workers"], start_new_session=True)
        time.sleep(3600)
    return socket.create_server(("127.0.0.1", 0)).getsockname()[1]


def asked(*answers: str) -> list[tuple[str, Answered]]:
    return [("it", Answered(question="", reference="", response=answer, answer=answer)) for answer in answers]


def daemons() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if "of test_workers" in (p.info["cmdline"] or [])]


def test_outside_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "42")
    monkeypatch.setenv("MY_TOKEN", "secret")
    verifier = TimedVerifier(CustomVerifier(f"{HERE}:rights"), 5, (0, 1e5), sandboxed=False, environment=("MY_KEY",))
    pool = LocalVerifierPool({"it": verifier}, workers=1, memory_mib=8192)
    verdicts = pool.verify(asked("count", "child", "named", "others", "port", "count", "daemon", "count"))
    assert [v.score for v in verdicts[:4]] == [1, 5, 42, 0]
    assert verdicts[4].score > 0
    assert verdicts[5].score == 2  # what it keeps stays
    assert verdicts[6] == Verdict(score=0.0, error="killed after 5 s", timed_out=True)
    assert verdicts[7].score == 1
    assert not daemons()
    pool.close()


def test_calls_from_several_threads_share_the_workers(tmp_path: Path) -> None:
    """The first caller's answer waits for what the second one's makes: a queue for each would wait for ever."""
    verifier = TimedVerifier(CustomVerifier(f"{HERE}:rights"), 60, (0, 10), sandboxed=False)
    pool = LocalVerifierPool({"it": verifier}, workers=2, memory_mib=8192)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(pool.verify, asked(f"wait {tmp_path / 'go'}"))
        while not (workers := pool._workers["it"])._workers or not workers._workers[0].asked:
            time.sleep(0.01)
        many = [threads.submit(pool.verify, asked("child", "child")) for _ in range(6)]
        assert [[v.score for v in one.result(200)] for one in many] == [[5, 5]] * 6
        assert not first.done()
        assert pool.verify(asked(f"make {tmp_path / 'go'}", "child"))[0].score == 8
        assert first.result(200)[0].score == 7
        assert len(workers._workers) == 2
        # Those that are under way when it is closed fail, and it starts anew.
        late = [threads.submit(pool.verify, asked(f"wait {tmp_path / 'never'}")) for _ in range(2)]
        while sum(len(worker.asked) for worker in workers._workers) < 2:
            time.sleep(0.01)
        pool.close()
        for one in late:
            with pytest.raises(RuntimeError, match="closed while they were at work"):
                one.result(200)
    assert pool.verify(asked("child"))[0].score == 5
    pool.close()


def test_a_call_costs_the_same_however_many_wait() -> None:
    """Counted in steps of the interpreter, in all threads that wait."""
    services = {"it": Hosted(pools._VerifierService(MathVerifier()), sandboxed=True, single=False)}
    workers = Workers(services, size=2, memory_mib=4096)
    pair = [Call("it", "it", Answered(question="", reference="4", response=t, answer=t), 60) for t in "45"]
    calls = pair * 10
    workers.run(calls[:2])
    steps = count()

    def scores(times: int) -> list[float]:
        sys.setprofile(lambda *_: next(steps))
        try:
            outcomes = workers.run(calls * times)
        finally:
            sys.setprofile(None)
        return [outcome.reply["score"] for outcome in outcomes if outcome.reply]

    def steps_a_call(callers: int, times: int) -> float:
        before = next(steps)
        with ThreadPoolExecutor(callers) as threads:
            assert list(threads.map(scores, [times] * callers)) == [[1.0, 0.0] * 10 * times] * callers
        return (next(steps) - before) / callers / times / len(calls)

    alone = steps_a_call(1, 1)
    assert steps_a_call(1, 10) < 1.5 * alone  # 5 times as many, where every answer goes through all that wait
    assert steps_a_call(30, 1) < 1.5 * alone
    workers.close()


def test_workers_that_cannot_start_fail_every_caller() -> None:
    verifier = TimedVerifier(CustomVerifier("no.such.module:at_all"), 60, sandboxed=False)
    pool = LocalVerifierPool({"it": verifier}, workers=1, memory_mib=8192)
    with ThreadPoolExecutor(3) as threads:
        for one in [threads.submit(pool.verify, asked("x")) for _ in range(3)]:
            with pytest.raises(UserError, match=r"no\.such"):
                one.result(200)


def test_a_machine_without_a_sandbox_refuses_what_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "rung", lambda: "none")
    monkeypatch.setattr(sandbox, "rung", lambda: "none")
    for verifier in (CustomVerifier(f"{HERE}:rights"), GymVerifier("countdown", {"size": 1})):
        with pytest.raises(UserError, match=r"task.rewards: it evaluates .* no Landlock .* set sandbox: none"):
            LocalVerifierPool({"it": TimedVerifier(verifier, 5)}, workers=1, memory_mib=4096)
        LocalVerifierPool({"it": TimedVerifier(verifier, 5, sandboxed=False)}, workers=1, memory_mib=4096).close()
    for verifier in (MathVerifier(), GymVerifier("chain_sum", {"size": 1})):
        LocalVerifierPool({"it": TimedVerifier(verifier, 5)}, workers=1, memory_mib=4096).close()


def test_an_answer_that_is_not_to_the_question() -> None:
    services = {"it": Hosted(pools._VerifierService(MathVerifier()), sandboxed=True, single=False)}
    workers = Workers(services, size=1, memory_mib=4096)
    item = Answered(question="", reference="4", response="4", answer="4")
    (outcome,) = workers.run([Call("it", "it", item, 30)])
    assert outcome.reply == {"score": 1.0, "well_formed": True, "error": "", "timed_out": False}
    (worker,) = workers._workers
    worker.asked[7] = Asked(7, "secret", Call("it", "it", item, 30))
    good = {"number": 7, "secret": "secret", "error": "", "timed_out": False}
    assert worker._read(json.dumps(good).encode() + b"\n{}")[1] == Outcome(reply={})
    for wrong in ({"secret": "other"}, {"secret": 3}, {"number": 8}, {"number": [7]}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            worker._read(json.dumps(good | wrong).encode() + b"\n{}")
    ours, theirs = socket.socketpair()
    worker.channel.close()
    worker.channel, deep = Channel(ours, 1 << 20), b"[" * 100_000
    theirs.sendall(HEADER.pack(len(deep)) + deep)
    assert worker.answers() == {7: Outcome(error="its worker answered what was not asked")}
    assert worker.over
    theirs.close()
    workers.close()


@pytest.mark.parametrize(
    ("reply", "score", "error"),
    [
        ({"score": 0.5}, 0.5, ""),
        ({"score": 1.5}, 0, "outside"),
        ({"score": -1e-9}, 0, "outside"),
        ({"score": 1e39}, 0, "outside"),
        ({"score": float("nan")}, 0, "outside"),
        ({"score": True}, 0, "no verdict"),
        ({"score": 1}, 0, "no verdict"),
        ({"score": "1"}, 0, "no verdict"),
        ({"well_formed": 1}, 0, "no verdict"),
        ({"more": 1}, 0, "no verdict"),
        ({"error": "\x1b[2J\ud83d" + "x" * 10_000}, 0, r"\x1b[2J\ud83dxxx"),
    ],
)
def test_verdicts_of_strangers(reply: dict[str, Any], score: float, error: str) -> None:
    verdict = read_verdict(
        Outcome(reply={"score": 1.0, "well_formed": True, "error": "", "timed_out": False} | reply), (0.0, 1.0)
    )
    assert verdict.score == score
    assert error in verdict.error
    assert len(verdict.error) < 600
    verdict.error.encode()


def test_frames_in_pieces_too_long_and_from_nobody() -> None:
    left, right = socket.socketpair()
    channel = Channel(left, largest=100)
    start = time.monotonic()
    right.sendall(b"\0\0\0\3ab")
    assert channel.receive() == []
    assert channel.partial
    right.sendall(b"c\0\0\0\0")
    assert channel.receive() == [b"abc", b""]
    right.sendall(b"\0\0\0\x65")
    with pytest.raises(Closed, match="101 bytes"):
        channel.receive()
    right.close()
    channel.queue(b"x")  # nobody is there
    with pytest.raises(Closed):
        channel.receive()
    assert time.monotonic() - start < 10


def test_the_clean_environment() -> None:
    given = {"HOME": "/h", "LC_ALL": "C", "HF_TOKEN": "a", "WANDB_API_KEY": "b", "RAY_AUTH_TOKEN": "c", "NAMED": "d"}
    clean = clean_environment(["NAMED"], {**given, "AWS_SECRET_ACCESS_KEY": "e", "OMP_NUM_THREADS": "8"})
    assert {name: clean[name] for name in clean if name in given} == {"HOME": "/h", "LC_ALL": "C", "NAMED": "d"}
    assert "AWS_SECRET_ACCESS_KEY" not in clean
    assert clean["OMP_NUM_THREADS"] == "1"


def test_settings() -> None:
    with pytest.raises(ValueError, match="the smaller first"):
        PythonReward(path="a:b", bounds=(1, 0))
    with pytest.raises(ValueError, match=r"bounds\.1\n  Input should be a finite number"):
        PythonReward(path="a:b", bounds=(0, float("inf")))
    with pytest.raises(ValueError, match="'full' or 'none'"):
        VerifierReward(sandbox="off")
    assert PythonReward(path="a:b").sandbox == VerifierReward().sandbox == "full"


class _Remote(Exception):
    def __init__(self, cause: object) -> None:
        super().__init__("remote")
        self.cause = cause


@pytest.mark.parametrize("cause", [None, "text", 3, SystemExit(1)])
def test_a_cause_that_is_no_exception(cause: object) -> None:
    with pytest.raises(_Remote, match="remote"):
        raise_cause(_Remote(cause))


def test_a_cause() -> None:
    with pytest.raises(UserError, match="here") as found:
        raise_cause(_Remote(UserError("here")))
    assert isinstance(found.value.__cause__, _Remote)


def test_paths_that_are_relative_to_where_the_trainer_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert clean_environment([], {"PYTHONPATH": f"a{os.pathsep}/b"})["PYTHONPATH"] == f"{tmp_path}/a{os.pathsep}/b"
