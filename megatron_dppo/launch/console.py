"""What a command prints with tables."""

from __future__ import annotations

from rich.console import Console


class CommandConsole(Console):
    """Standard output for commands that end where nobody reads it: `exit_status` says so, which rich's own way, to
    exit with status 1 and no word, would not reach."""

    def on_broken_pipe(self) -> None:
        """Called while the `BrokenPipeError` is handled: raise it on."""
        raise
