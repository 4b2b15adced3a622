"""Errors a user can act on. The command line prints them as one line; anything else is a fault of ours and keeps its
traceback. And what such a line quotes: the errors of others, the name that was meant."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn


class UserError(Exception):
    """Something in a config, a file or the machine must change. The message names the field or file, what is wrong
    and what to do, in one line: what it quotes of files and of other libraries has line ends as blanks and other
    characters that do not print (those that a terminal would obey, halves of surrogate pairs) as escapes."""

    def __init__(self, message: str) -> None:
        joined = re.sub(r"\s*[\n\r]\s*", " ", message)
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined))


_USERS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINVAL, errno.EXDEV),
}
"""Of an OSError: what a user puts right. A path, a permission, room on a disk."""


class SystemFault(OSError):
    """A device, a network or a file server failed. The message names the file."""


def of_system(error: BaseException) -> bool:
    """Whether it is a fault of the system (EIO, ESTALE, ETIMEDOUT and whatever else there is), which may have passed
    when a run is started again. Another OSError without a number is a library's, of what a file holds."""
    if isinstance(error, SystemFault | TimeoutError | ConnectionError):
        return True
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _USERS


def of_file(error: BaseException, message: str) -> UserError | SystemFault:
    """What to raise where a file could not be read or written: `SystemFault` for a fault of the system, after which a
    run is started again, `UserError` for anything else."""
    return SystemFault(message) if of_system(error) else UserError(message)


@contextmanager
def file_errors(what: str, instead: str = "") -> Iterator[None]:
    """Around what reads or writes a file: an OSError inside becomes what `of_file` makes of `what` was tried, the
    reason, and what may be done `instead`."""
    try:
        yield
    except OSError as error:
        raise of_file(error, f"{what}: {error.strerror or error}{f'; {instead}' if instead else ''}") from error


def raise_cause(error: Exception) -> NoReturn:
    """Raise what a remote call raised there (`cause` of Ray's RayTaskError) from `error`; `error` itself where no
    exception came over: it could not be pickled, or is none."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception) and cause is not error:
        raise cause from error
    raise error


def listed(names: Sequence[str], most: int, *, between: str = ", ") -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{between.join(names[:most])}{more}"


def first_line(error: BaseException) -> str:
    """What an error says, without the lines that follow; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def typed_line(error: BaseException) -> str:
    """The same behind the error's type: for those that no user made."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1, prefix: str = "") -> str:
    """The end of a line on an unknown word: `; did you mean X?`, or nothing where no known one is close."""
    close = difflib.get_close_matches(str(word), list(known), n=most)
    return f"; did you mean {' or '.join(prefix + one for one in close)}?" if close else ""
