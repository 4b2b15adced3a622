"""Checksums of a folder's files, in a file beside them that is written last: what was written is what is read.

`checksums.xxh128` has a line for each file, `DIGEST  PATH`, the XXH3 digest of its bytes in 32 hexadecimal digits:
`xxhsum --check checksums.xxh128` reads it too, and programs that do not know it leave it alone. It needs no checksum of
its own. Each of its bits belongs to a digest, to the path of a file or to the form of a line, so that a change of any
makes a file wrong, absent or the line unreadable; and the last line is that of the file without which the folder is
none of its kind (its mark), so that a list that was cut off is noticed.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from megatron_dppo.checkpoint.atomic import sync, write_synced
from megatron_dppo.errors import UserError

CHECKSUMS = "checksums.xxh128"
_LINE = re.compile(r"([0-9a-f]{32})  (.+)")
_CHUNK = 2**20
"""Bytes that are digested and then written while they are in the processor's cache."""
_THREADS = min(8, os.cpu_count() or 1)
"""That read files at a time; digesting leaves Python's lock alone."""


class ChecksummedFile(io.BufferedWriter):
    """A new binary file that digests what is written to it, from its start to its end, as it is written.

    report  called with the path, and the digest when all is on the disk, or the error of a file that cannot be written:
            libraries that write to it tell of that only that there was one
    """

    def __init__(
        self, path: Path | str, report: Callable[[tuple[str, str | OSError]], object] = lambda _: None
    ) -> None:
        self.path, self._report, self._hash = Path(path), report, xxhash.xxh3_128()
        with self._reported():
            super().__init__(io.FileIO(path, "wb"))

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._report((str(self.path), error))
            raise

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        with self._reported():
            for start in range(0, len(view), _CHUNK):
                part = view[start : start + _CHUNK]
                self._hash.update(part)
                super().write(part)
        return len(view)

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("a checksummed file is written from start to end")

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        if self.closed:
            return
        with self._reported():
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()
        self._report((str(self.path), self.digest))


def write_checksums(folder: Path, *, mark: str, known: Mapping[str, str] | None = None) -> None:
    """Flush the folder's files to the disk and write their checksums, the mark's last.

    known  digests by path in the folder, of files that were digested and flushed when they were written; the others are
           read again
    """
    digests = dict(known or {})
    present = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*")}
    others = [name for name, file in present.items() if file.is_file() and name not in {*digests, CHECKSUMS}]
    for path in [*(present[name] for name in others), *(file for file in present.values() if file.is_dir())]:
        sync(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests |= zip(others, pool.map(lambda name: _digest(present[name]), others), strict=True)
    names = [*sorted(digests.keys() - {mark}), mark]
    write_synced(folder / CHECKSUMS, "".join(f"{digests[name]}  {name}\n" for name in names))
    sync(folder)


def check_folder(
    folder: Path, *, mark: str, which: Callable[[str], bool] = lambda _: True, share: tuple[int, int] = (0, 1)
) -> bool:
    """`UserError` names the first file that is absent or not what was written, `OSError`, with number and path, one
    that cannot be read. False for a folder that has no checksums.

    which  the files to check, by their path in the folder
    share  (number, of): of those, every `of`-th from that number on
    """
    digests = _read(folder / CHECKSUMS, mark)
    if digests is None:
        return False
    names = sorted(filter(which, digests))[share[0] :: share[1]]
    with ThreadPoolExecutor(_THREADS) as pool:
        for fault in pool.map(lambda name: _fault(folder / name, digests[name]), names):
            if fault:
                raise fault
    return True


def _read(file: Path, mark: str) -> dict[str, str] | None:
    """Digests by path; None where there is no such file."""
    try:
        *lines, rest = file.read_bytes().decode().split("\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is damaged: {error}") from None
    digests: dict[str, str] = {}
    for number, line in enumerate([*lines, *([rest] if rest else [])], start=1):
        match = _LINE.fullmatch(line)
        if not match or not _is_inside(match[2]) or match[2] in digests:
            raise UserError(f"{file} is damaged: line {number} is no digest and path of a file")
        digests[match[2]] = match[1]
    if rest or list(digests)[-1:] != [mark]:
        raise UserError(f"{file} is damaged: it does not end with the line of {mark}")
    return digests


def _fault(file: Path, digest: str) -> UserError | OSError | None:
    try:
        if not file.is_file():
            return UserError(f"{file} is missing")
        found = _digest(file)
    except OSError as error:
        return OSError(error.errno, error.strerror, str(file))
    if found == digest:
        return None
    return UserError(f"{file} is damaged, or of another folder: its checksum is not that in {CHECKSUMS}")


def _digest(file: Path) -> str:
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return name.isprintable() and path.as_posix() == name and not path.is_absolute() and not {"..", "."} & {*path.parts}
