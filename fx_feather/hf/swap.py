"""A model's files in a folder, replaced all at once: who reads finds the old ones or the new ones, never some of each.

New files are written to `.saving` beside the old ones. Its renaming to `.saved` is the moment at which the folder has
the new model: from then on its files are read from there. They are moved to their places afterwards, `config.json` away
first and back last, so that a reader who doesn't know of `.saved` finds no model rather than a mixed one.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ShapeError, fail

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
WRITING, READY, NAMES = ".saving", ".saved", ".names"

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def names(folder: Path) -> set[str] | None:
    """The files of a model that was saved, but is not yet in its place; None where all is."""
    try:
        return set(json.loads((folder / READY / NAMES).read_text()))
    except (OSError, ValueError):
        return None


def locate(folder: Path, name: str) -> Path:
    """Where a file of a folder is to be read."""
    ahead = folder / READY / name
    return ahead if names(folder) is not None and ahead.exists() else folder / name


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Gives an empty folder for all files of a model, and puts them in place of those of the folder at its end.

    Raises:
        ShapeError: another process is writing to the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        _lock(held, folder)
        _finish(folder)
        writing = folder / WRITING
        shutil.rmtree(writing, ignore_errors=True)
        os.mkdir(writing)
        try:
            yield writing
            put(writing / NAMES, json.dumps(sorted(os.listdir(writing))).encode())
        except Exception:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        _sync(writing)
        os.rename(writing, folder / READY)
        os.fsync(held)
        _finish(folder)
    finally:
        # The lock ends with it.
        os.close(held)


def put(path: Path, data: bytes) -> None:
    """Writes a small file to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _finish(folder: Path) -> None:
    """Moves the files of `.saved` to their places; it can be interrupted anywhere, and called again."""
    ready, new = folder / READY, names(folder)
    if new is not None:
        if (ready / CONFIG).exists():
            (folder / CONFIG).unlink(missing_ok=True)
            _sync(folder)
        for name in os.listdir(folder):
            if _WEIGHTS.fullmatch(name) and name not in new:
                os.unlink(folder / name)
        # The index after the files that it names, the config after all.
        for name in sorted(new, key=lambda n: (n == CONFIG, n == INDEX, n)):
            if (ready / name).exists():
                os.rename(ready / name, folder / name)
        _sync(folder)
        os.unlink(ready / NAMES)
    if ready.is_dir():
        os.rmdir(ready)
        _sync(folder)


def _sync(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def _lock(held: int, folder: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        rank = os.environ.get("RANK")
        fail(
            ShapeError,
            call=f"ff.hf.save({str(folder)!r}, model, params)",
            got=f"a folder that another process is writing to{'' if rank is None else f', on rank {rank}'}",
            number="2 processes write into one folder",
            rule="whole parameters are the same on every rank: one of them writes them",
            fix="if rank == 0: ff.hf.save(folder, model, params)",
        )
