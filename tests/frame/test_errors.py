"""What one line quotes of other errors, and of the names that were meant."""

from __future__ import annotations

import errno
import pickle

import pytest

from megatron_dppo.errors import SystemFault, UserError, did_you_mean, first_line, listed, of_file, typed_line


@pytest.mark.parametrize(
    ("error", "first", "typed"),
    [
        (ValueError("no such file\nTraceback ..."), "no such file", "ValueError: no such file"),
        (KeyError("name"), "'name'", "KeyError: 'name'"),
        (OSError("\n  cut off  \n\nmore"), "cut off  ", "OSError: cut off  "),
        (ConnectionError(), "ConnectionError", "ConnectionError: "),  # libraries raise such, and the reason must stand
        (RuntimeError("  \n"), "RuntimeError", "RuntimeError: "),
    ],
)
def test_the_first_line_of_an_error_is_never_missing(error: Exception, first: str, typed: str) -> None:
    assert first_line(error) == first
    assert typed_line(error) == typed


def test_a_list_says_how_many_more_there_are() -> None:
    assert [listed(["a", "b", "c"][:n], 2) for n in range(4)] == ["", "a", "a, b", "a, b and 1 more"]
    assert listed(["x"] * 1002, 1, between="; ") == "x and 1,001 more"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "Input/output error"), SystemFault),
        (OSError(errno.ESTALE, "Stale file handle"), SystemFault),
        (TimeoutError("timed out"), SystemFault),
        (ConnectionResetError(), SystemFault),
        (PermissionError(errno.EACCES, "Permission denied"), UserError),
        (OSError(errno.ENOSPC, "No space left on device"), UserError),
        (OSError("no such model"), UserError),  # as transformers says it
        (ValueError("cut off"), UserError),
    ],
)
def test_whose_fault_an_error_is_stays_as_it_is_told_on(error: Exception, kind: type[Exception]) -> None:
    """Of what is wrapped again, and comes from another rank, too."""
    told = pickle.loads(pickle.dumps(of_file(error, "f cannot be read")))
    again = of_file(told, f"cannot finish g: {getattr(told, 'strerror', None) or told}")
    assert (type(told), type(again), str(again)) == (kind, kind, "cannot finish g: f cannot be read")


def test_a_word_that_is_close_is_named_and_no_other() -> None:
    assert did_you_mean("stepz", ["steps", "seed"]) == "; did you mean steps?"
    assert did_you_mean("stepz", ["steps", "seed"], prefix="trainer.") == "; did you mean trainer.steps?"
    assert did_you_mean(None, ["steps"]) == "", "a caller's own words may be anything"  # type: ignore[arg-type]
    two = did_you_mean("threshold", ["threshold_negative", "threshold_positive", "topk"], most=2)
    assert two == "; did you mean threshold_positive or threshold_negative?"
    assert did_you_mean("learning", ["steps", "seed"]) == did_you_mean("x", []) == ""
