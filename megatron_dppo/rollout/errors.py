"""What a rollout engine may answer instead of a rollout."""

from __future__ import annotations


class EngineClosed(RuntimeError):
    """The engine was closed, or its gate is shut after a weight sync that did not finish."""


class EngineDead(RuntimeError):
    """The engine's core process ended or hung. Nothing can be asked of it any more; the reason is in its log."""


class GenerationTimeout(TimeoutError):
    """`generate` took longer than `rollout.generate_timeout_s`; its requests were aborted."""
