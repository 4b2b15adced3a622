"""The Python tool: what it shows, and what it holds."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from megatron_dppo.agents.python_tool import run_python


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("17 * 3", "51"),
        ("x = 2\nprint('x is', x)\nx ** 10", "x is 2\n1024"),
        ("'text'", "text"),
        ("x = 1", ""),
        ("", ""),
        ("import statistics\nstatistics.mean([1, 2, 6])", "3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("'\\ud800'", "\\ud800"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_it_shows_what_an_interpreter_shows(code: str, shown: str) -> None:
    assert run_python(code) == shown


def test_what_it_runs_reaches_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "PermissionError" in run_python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
    assert "PermissionError" in run_python(f"open({str(secret)!r}).read()")
    assert "Error" in run_python("import os; os.fork()")
    assert "Error" in run_python("import subprocess; subprocess.run(['/bin/ls'])")
    assert "PermissionError" in run_python("import os; os.kill(os.getppid(), 9)")


def test_it_ends_what_takes_too_long_or_says_too_much() -> None:
    started = time.monotonic()
    assert run_python("while True: pass", timeout_s=0.5).startswith("(ended: it took more than 0.5 s")
    assert "characters)" in run_python("print('x' * 10_000)", most=100)
    assert "(ended:" in run_python("while True: print('x' * 1000)", most=10_000_000)
    assert time.monotonic() - started < 60
