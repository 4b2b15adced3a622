"""Numerical mismatch of trainer and engine with the same weights: the paper's Figure 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dppo.errors import UserError, file_errors

MISMATCH_FILE = "mismatch.npz"
MISMATCH_TOKENS = 20_000
"""Tokens kept of each rank that has log-probabilities."""


@dataclass(frozen=True)
class Mismatch:
    """Log-probabilities of the tokens of a first rollout, before any update, float32 `[n]` each."""

    log_mu: np.ndarray
    """The engine's."""
    log_pi: np.ndarray
    """The trainer's with the engine's routes replayed."""
    log_pi_live: np.ndarray
    """The trainer's with its own routers; the same where the model has no experts."""

    @staticmethod
    def of(replayed: np.ndarray, live: np.ndarray) -> Mismatch:
        """From (log mu, log pi) `[n, 2]` of two passes over the same tokens."""
        return Mismatch(replayed[:, 0], replayed[:, 1], live[:, 1])

    def write(self, folder: Path) -> None:
        """Raises `UserError` where it cannot be written."""
        path = folder / MISMATCH_FILE
        with file_errors(f"{path}: cannot write"):
            np.savez_compressed(path, log_mu=self.log_mu, log_pi=self.log_pi, live=self.log_pi_live)

    @staticmethod
    def read(folder: Path) -> Mismatch:
        """Raises `UserError` where the run has none."""
        path = folder / MISMATCH_FILE
        try:
            with np.load(path) as arrays:
                return Mismatch(arrays["log_mu"], arrays["log_pi"], arrays["live"])
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file; a run writes it with trainer.parity_check=true") from error
        except Exception as error:  # numpy meets damage wherever it reads: in a zip file, in zlib, in Python's tokens
            raise UserError(f"{path}: not what a run writes: {error}") from error
