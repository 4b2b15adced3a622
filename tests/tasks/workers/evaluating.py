"""A reward that evaluates what a policy wrote, and what may be written to it.
`python -m tests.tasks.workers.evaluating`
scores it all and prints what came of it, as JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dppo.tasks.rewards.pool import CustomVerifier, LocalVerifierPool, TimedVerifier
from megatron_dppo.tasks.rewards.verdict import Answered, Verdict
from megatron_dppo.tasks.workers import sandbox

SECRET = "not for models"
LIMITS_S = {"hasty": 1.0, "patient": 60.0}
"""For texts that do not end, and for those that must be read to their end on a busy machine too."""


def send(frame: bytes) -> None:
    for number in range(3, 8):
        with suppress(OSError):
            os.write(number, frame)


def evaluate(*, answer: str, reference: str, **_: Any) -> float:
    """1 where the answer's value is the reference."""
    modules = "os sys time socket struct json threading builtins fcntl resource pickle"
    names = {name: __import__(name) for name in modules.split()}
    return float(eval(answer, {"send": send} | names) == float(reference))


def hostile(marker: Path, port: int, trainer: int) -> dict[str, str]:
    """Texts by what they attempt. An attempt that succeeds evaluates to 7, the reference, or leaves its mark."""

    def forged(said: str, then: str) -> str:
        """Writes the frame of an answer to whatever may lead to the supervisor."""
        return f"(send(struct.pack('>I', len(said := {said})) + said), {then})[-1]"

    verdict = "json.dumps({'score': %s, 'well_formed': True, 'error': '', 'timed_out': False}).encode()"
    return {
        "environment": "7 if 'MY_TOKEN' in os.environ else 0",
        "own /proc": "7 if b'MY_TOKEN' in open('/proc/self/environ', 'rb').read() else 0",
        "parent's /proc": "7 if b'MY_TOKEN' in open(f'/proc/{os.getppid()}/environ', 'rb').read() else 0",
        "trainer's /proc": f"7 if b'MY_TOKEN' in open('/proc/{trainer}/environ', 'rb').read() else 0",
        "parent's memory": "7 if open(f'/proc/{os.getppid()}/mem', 'r+b') else 0",
        "tcp": f"7 if socket.create_connection(('127.0.0.1', {port}), timeout=5) else 0",
        "udp": f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port})) and 7",
        "unix": "7 if socket.socket(socket.AF_UNIX) else 0",
        "fork": "[os.fork() for _ in range(1000)] and 7",
        "threads": "[threading.Thread(target=time.sleep, args=(100,)).start() for _ in range(1000)] and 7",
        "program": f"7 if os.posix_spawn('/bin/touch', ['touch', '{marker}'], {{}}) else 0",
        "disk": "[open(str(n), 'wb').write(bytes(1 << 20)) for n in range(1 << 20)]",
        "one file": "7 if open('big', 'wb').write(bytes(1 << 26)) else 0",
        "files": "[open(str(n), 'w').close() for n in iter(lambda: time.monotonic_ns(), 0)]",
        "outside": f"7 if open('{marker}', 'w') else 0",
        "mode": f"os.chmod('{marker.parent}', 0) or 7",
        "times": f"os.utime('{marker.parent}', (1, 1)) or 7",
        "link": f"(os.symlink('{marker.parent}', 'link'), open('link/{marker.name}', 'w'), 7)[-1]",
        "kill the parent": "os.kill(os.getppid(), 9) or 7",
        "kill the trainer": f"os.kill({trainer}, 9) or 7",
        "kill all": "os.kill(-1, 9) or 7",
        "starve the trainer": f"7 if resource.prlimit({trainer}, resource.RLIMIT_AS, (0, 0)) else 0",
        "signal by a pipe": f"(p := os.pipe(), fcntl.fcntl(p[0], 8, {trainer}), 7)[-1]",
        "shared memory": "7 if os.memfd_create('x') else 0",
        "forge and answer": forged(verdict % "1.0", "0"),
        "forge out of bounds": forged(verdict % "1e6", "os._exit(0)"),
        "forge infinity": forged(verdict % "float('inf')", "os._exit(0)"),
        "forge a pickle": forged(
            f"pickle.dumps(type('X', (), {{'__reduce__': lambda self: (os.system, ('touch {marker}',))}})())",
            "os._exit(0)",
        ),
        "forge nonsense": forged("b'[' * 100000", "os._exit(0)"),
        "forge a long one": forged("b'7' * (1 << 22)", "7"),
        "half an answer": "(os.write(3, struct.pack('>I', 100)), time.sleep(1000))",
        "an answer and no end": forged(verdict % "1.0", "time.sleep(1000)"),
        "print": "[print('x' * 1000, flush=True) for _ in iter(int, 1)]",
        "print to stderr": "[sys.stderr.write('x' * 1000) for _ in iter(int, 1)]",
        "sleep": "time.sleep(1000)",
        "stop": "os.kill(os.getpid(), 19)",
        "compute": "9 ** 9 ** 9",
        "memory": "len(bytearray(1 << 40))",
        "end": "os._exit(0)",
        "leave": "sys.exit(0)",
        "close": "os.closerange(0, 64)",
        "patch": "setattr(builtins, 'float', lambda x: 1.0) or setattr(json, 'dumps', lambda x: '{}')",
        "recursion": "(f := lambda: f())()",
    }


def main() -> None:
    os.environ["MY_TOKEN"] = SECRET
    folder = Path(sys.argv[1])
    folder.joinpath("private").mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    marker = folder / "private" / "marker"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        port = server.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        texts = hostile(marker, port, os.getpid())
        verifier = CustomVerifier(f"{__spec__.name}:evaluate")
        timed = {name: TimedVerifier(verifier, limit) for name, limit in LIMITS_S.items()}
        pool = LocalVerifierPool(timed, workers=2, memory_mib=4096)
        honest = [f"{n} + 3" for n in range(8)] * (len(texts) * 3 // 8 + 1)
        answers, names = [], []
        for name, text in texts.items():
            answers += [text, *(honest.pop() for _ in range(3))]
            names += [name, "", "", ""]
        before = (folder / "private").stat()

        def scored(named: list[tuple[str, str]]) -> list[Verdict]:
            return pool.verify([
                ("patient" if not name or name.startswith("forge") else "hasty",
                 Answered(question="", reference="7", response=text, answer=text))
                for name, text in named
            ])  # fmt: skip

        all_of_them = list(zip(names, answers, strict=True))
        clean = scored([(name, text) for name, text in all_of_them if not name])
        verdicts = scored(all_of_them)
        pool.close()
        server.setblocking(False)
        udp.setblocking(False)
        reached = []
        for read in (server.accept, lambda: udp.recv(1)):
            try:
                reached.append(str(read()))
            except BlockingIOError:
                continue
    after = (folder / "private").stat()
    print(
        json.dumps(
            {
                "rung": sandbox.rung(),
                "user": os.getuid(),
                "clean": [verdict.score.hex() for verdict in clean],
                "honest": [v.score.hex() for v, name in zip(verdicts, names, strict=True) if not name],
                "hostile": {name: vars(v) for name, v in zip(names, verdicts, strict=True) if name},
                "left": [str(path) for path in folder.rglob("*")],
                "changed": (before.st_mode, before.st_mtime_ns) != (after.st_mode, after.st_mtime_ns),
                "reached": reached,
            }
        )
    )


if __name__ == "__main__":
    main()
