"""A Python tool for harnesses: what the policy writes runs in the sandbox of the rewards, and says what it printed."""

from __future__ import annotations

import ast
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from megatron_dppo.tasks.workers.sandbox import Limits, code_folders, die_with_parent, lock_down, nobody, require

_MOST_READ = 1 << 20
"""Bytes of output after which a program is ended."""


def run_python(code: str, *, timeout_s: float = 5.0, memory_mib: int = 4096, most: int = 4000) -> str:
    """What `code` prints, and the value of its last line where that is an expression, as an interpreter shows it; the
    last line of its traceback where it raises. At most `most` characters. It blocks.

    The program is a process of its own, forked from this one, which can compute and print: no network, no files but its
    own folder and the installed packages, no further process (see `tasks.workers.sandbox`). Raises UserError where this
    machine has no sandbox.
    """
    require("agents.python_tool", "write a tool of your own")
    folder = Path(tempfile.mkdtemp(prefix="python-tool-"))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _be_the_program(code, folder, writing, Limits(memory_mib << 20, int(timeout_s) + 1))
        finally:
            os._exit(1)
    os.close(writing)
    try:
        output, in_time = _read(reading, time.monotonic() + timeout_s)
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)
    text = output.decode(errors="replace").strip()
    if not in_time:
        text = f"{text}\n(ended: it took more than {timeout_s:g} s, or printed too much)".strip()
    return text if len(text) <= most else f"{text[:most]}\n... ({len(text)} characters)"


def _be_the_program(code: str, folder: Path, end: int, limits: Limits) -> None:
    die_with_parent()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for number, of in ((0, nowhere), (1, end), (2, end)):
        os.dup2(of, number)
    os.closerange(3, 1 << 30)
    user = nobody()
    if os.geteuid() == 0:
        with suppress(OSError):
            os.chown(folder, user, user)
    lock_down(folder, code_folders(), limits, user)
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    status = 0
    try:
        _interpret(code)
    except BaseException as error:
        print("".join(traceback.format_exception_only(error)).strip())
        status = 1
    sys.stdout.flush()
    os._exit(status)


def _interpret(code: str) -> None:
    """As at a prompt: the value of a last expression is shown."""
    tree, names = ast.parse(code), {"__name__": "__main__"}
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<tool>", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<tool>", "eval"), names)
        if value is not None:
            print(value if isinstance(value, str) else repr(value))


def _read(end: int, deadline: float) -> tuple[bytes, bool]:
    """Until the program ends, or its time or its output does; and whether it ended by itself."""
    output = b""
    while (left := deadline - time.monotonic()) > 0 and len(output) <= _MOST_READ:
        if select.select([end], [], [], left)[0]:
            piece = os.read(end, 1 << 16)
            if not piece:
                return output, True
            output += piece
    return output, False
