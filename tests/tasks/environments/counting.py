"""Environments in which something is amiss: one misbehaves as it is told, one hides its state."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import time
from typing import Any


class Counting:
    """Gives 1 for each of four steps, in a state of its own, and misbehaves at the second as it is told."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.seed, self.steps = seed or 0, 0
        return f"state {self.seed}", {}

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        self.steps += 1
        if self.steps == 2:
            match action:
                case "hang":
                    time.sleep(3600)
                case "spin":
                    return math.factorial(10**9), 0, False, False, {}
                case "raise":
                    raise KeyError("no such move")
                case "crash":
                    os._exit(3)
                case "number":
                    return 3, 1.0, False, False, {}
                case "nan":
                    return "x", math.nan, False, False, {}
                case "text":
                    return "x", "1.0", False, False, {}
                case "no":
                    return "x", 1.0, "no", False, {}
                case "exit":
                    raise SystemExit(0)
                case "closed":
                    os.closerange(0, 64)
                case "flood":
                    os.write(1, b"x" * (1 << 26))
                    raise ValueError("after 64 MiB of output")
                case "huge":
                    return "x", 1e39, False, False, {}
                case "none":
                    return None  # type: ignore[return-value]
                case "long":
                    return "x" * (1 << 22), 1.0, False, False, {}
                case "network":
                    socket.create_connection(("127.0.0.1", 9))
                case "program":
                    subprocess.run(["true"])
        return f"seed {self.seed} step {self.steps} heard {action}", 1.0, self.steps == 4, False, {}


class Stalling:
    """Gives 1 for each of two turns; the second never comes in episodes that begin with one of the seeds `hangs`."""

    def __init__(self, hangs: tuple[int, ...] = ()) -> None:
        self.hangs = hangs

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.stalls, self.steps = seed in self.hangs, 0
        return f"state {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.stalls and self.steps == 2:
            time.sleep(3600)
        return "go on", 1.0, self.steps == 2, False, {}


class Hiding:
    """Every seed begins alike, and hides another number."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.hidden = seed
        return "guess", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return str(self.hidden), 0.0, True, False, {}
