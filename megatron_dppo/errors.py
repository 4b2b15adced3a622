"""Errors a user can act on. The command line prints them as one line; anything else is a fault of ours and keeps its
traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something in a config, a file or the machine must change. The message names the field or file, what is wrong
    and what to do."""
