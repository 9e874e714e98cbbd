"""Replacing the files of a folder at once: a process that is killed leaves all old files or all new ones."""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ShapeError, fail

#: Names the files that are about to take the place of others; while it is there, they already have.
JOURNAL = ".saving.json"
_NEW = ".new"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


class Files:
    """The files of a folder by their names, those of a save that was cut short after all was written among them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._names: list[str] | None = None
        with contextlib.suppress(OSError, ValueError):
            # It is written by a rename, so that it is whole; what can't be read is none of ours.
            self._names = [str(n) for n in json.loads((folder / JOURNAL).read_text())]

    def path(self, name: str) -> Path:
        """Where a file lies."""
        new = self.folder / (name + _NEW)
        return new if self._names is not None and name in self._names and new.exists() else self.folder / name

    def has(self, name: str) -> bool:
        """Whether there is such a file; a file of weights that the last save didn't write is about to be removed."""
        stale = self._names is not None and name not in self._names and _WEIGHTS.fullmatch(name) is not None
        return not stale and self.path(name).exists()


def replace(folder: Path, files: Mapping[str, Callable[[Path], Any]]) -> None:
    """Writes files beside those of a folder, then lets them take their place, and removes older weights.

    Args:
        folder: where to; it is made if there is none.
        files: for each name what writes it to a path.

    Raises:
        ShapeError: another process is writing into the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        _finish(folder)
        for path in folder.glob("*" + _NEW):
            path.unlink()  # of a save that was cut short before all was written
        for name, write in files.items():
            write(folder / (name + _NEW))
            _sync(folder / (name + _NEW))
        # From here on the new files are those of the folder, whatever of them has its name already.
        waiting = folder / (JOURNAL + _NEW)
        waiting.write_text(json.dumps(list(files)))
        _sync(waiting)
        os.replace(waiting, folder / JOURNAL)
        _sync(folder)
        _finish(folder)


def _finish(folder: Path) -> None:
    """Does what a journal says, if there is one, in any state that a kill may have left it in."""
    try:
        names = json.loads((folder / JOURNAL).read_text())
    except (OSError, ValueError):
        return
    for name in names:
        if (folder / (name + _NEW)).exists():
            os.replace(folder / (name + _NEW), folder / name)
    for path in folder.iterdir():
        if path.name not in names and _WEIGHTS.fullmatch(path.name):
            path.unlink()
    _sync(folder)
    (folder / JOURNAL).unlink()
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the folder against other processes; the lock goes with the process, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail(
                ShapeError,
                call=f"ff.hf.save({str(folder)!r})",
                got="a folder that another process is writing into",
                number="2 processes write into one folder",
                rule="one process writes a folder: files of several would be mixed",
                fix="if int(os.environ.get('RANK', '0')) == 0: ff.hf.save(...), or a folder for each",
            )
        yield
    finally:
        os.close(handle)
