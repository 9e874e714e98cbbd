"""Safetensors files, read a part at a time and written a tensor at a time."""

import collections
import json
import math
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import safetensors
import torch
from torch import Tensor

from ..errors import ShapeError, fail

NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: name for name, dtype in NAMES.items()}

CHUNK = 8 << 20
"""Bytes that are read at once where only a part of each row is wanted."""

LONGEST = 100_000_000
"""Bytes of a header at most, as in the safetensors library."""

POINTER = b"version https://git-lfs"
"""How the text begins that stands in for a file which git-lfs has not fetched."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: where its bytes begin, and what they are."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stamp: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, slices: Sequence[slice]) -> Tensor:
        """A rectangular part: only rows that hold it are read, and no more than it and one chunk is held at a time.

        A file is read rather than mapped, since mapped pages count as memory of the process.

        Raises:
            ShapeError: the file became shorter since its header was read.
        """
        bounds = [s.indices(n)[:2] for s, n in zip(slices, self.shape, strict=True)]
        out = torch.empty([max(0, b - a) for a, b in bounds], dtype=self.dtype)
        if out.numel() == 0:
            return out
        # A tensor without dims is read as one row.
        shape: tuple[int, ...] = self.shape or (1,)
        bounds, target = bounds or [(0, 1)], out if self.shape else out.view(1)
        row = math.prod(shape[1:]) * self.dtype.itemsize
        (first, last), inner = bounds[0], tuple(slice(a, b) for a, b in bounds[1:])
        whole = all((a, b) == (0, n) for (a, b), n in zip(bounds[1:], shape[1:], strict=True))
        with self.path.open("rb") as file:
            if self.stamp is not None and self.stamp != stamp(file.fileno()):
                changed(self.path, "it was written again since its header was read")
            file.seek(self.start + first * row)
            if whole:
                _fill(file, target)
                return out
            step = max(1, CHUNK // row)
            for at in range(first, last, step):
                rows = torch.empty((min(step, last - at), *shape[1:]), dtype=self.dtype)
                _fill(file, rows)
                target[at - first : at - first + len(rows)] = rows[(slice(None), *inner)]
        return out


def _fill(file: Any, out: Tensor) -> None:
    flat = out.view(-1).view(torch.uint8).numpy().data
    got = file.readinto(flat)
    if got != len(flat):
        changed(Path(file.name), f"it ends {len(flat) - got} bytes too early")


def changed(path: Path, number: str) -> NoReturn:
    """Raises the error about a file that changed while it was read."""
    fail(
        ShapeError,
        call=f"ff.hf.load({str(path.parent)!r})",
        got=f"file {path.name}",
        number=number,
        rule="files stay as they are while they are read: parts of two models are none",
        fix="load again, once nothing writes to the folder",
    )


def stamp(file: Path | int) -> tuple[int, ...] | None:
    """What tells a file from one that took its place; None where there is none."""
    try:
        s = os.stat(file)
    except OSError:
        return None
    return s.st_ino, s.st_size, s.st_mtime_ns


def equal(one: Entry, two: Entry) -> bool:
    """Whether two tensors are the same bytes, of the same shape and dtype."""
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    rest = [slice(None)] * (len(one.shape) - 1)
    step = max(1, CHUNK * one.shape[0] // max(1, one.nbytes)) if one.shape else 1
    if not one.shape:
        return torch.equal(one.read([]), two.read([]))
    rows = (slice(at, at + step) for at in range(0, one.shape[0], step))
    return all(torch.equal(*(e.read([r, *rest]).view(torch.uint8) for e in (one, two))) for r in rows)


def odd(path: Path) -> str | None:
    """A clause that says why a path can't be read as a file; None where it can.

    To open a FIFO waits for one who writes, and a device may never end: both are refused before.

    >>> odd(Path("/dev/null")), odd(Path("/"))
    ('it is a device, not a file', 'it is a folder, not a file')
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "it is a link to nothing" if path.is_symlink() else "it is missing"
    except OSError as e:
        return f"it can't be read: {e.strerror}"
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    if not stat.S_ISREG(mode):
        return f"it is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file"
    return None if os.access(path, os.R_OK) else "it can't be read: permission denied"


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names all differ (`object_pairs_hook`); of two of one name, readers take either."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = collections.Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice!r} is there twice")
    return found


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def entries(path: Path) -> tuple[dict[str, Entry], list[str]]:
    """The tensors of a file, and one clause for each thing that is wrong with it."""
    wrong = odd(path)
    if wrong:
        return {}, [wrong]
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(len(POINTER))
        if first == POINTER:
            return {}, ["it is a git-lfs pointer, the weights were not fetched: git lfs pull"]
        length = int.from_bytes(first[:8], "little")
        if size < 8 or length > size - 8 or length > LONGEST:
            return {}, [
                f"its header of {length} bytes does not fit in {size} bytes: it is truncated, or no safetensors"
            ]
        file.seek(8)
        text = file.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=once, parse_constant=_not_json)
    except (ValueError, RecursionError) as e:
        return {}, [f"its header is not JSON, it is no safetensors file: {e}"]
    if not isinstance(header, dict) or text[:1] != b"{":
        return {}, ["its header is no JSON object: it is no safetensors file"]
    found, wrongs = _checked(path, header, 8 + length, size)
    if not wrongs:
        # The library has the last word: what others can't read is not read here either.
        try:
            with safetensors.safe_open(path, framework="pt"):
                pass
        except (safetensors.SafetensorError, OSError, ValueError) as e:
            wrongs.append(f"the safetensors library refuses it: {e}")
    return found, wrongs


def _checked(path: Path, header: dict[str, Any], begin: int, size: int) -> tuple[dict[str, Entry], list[str]]:
    """The entries of a header: tensors follow one another without a gap, from its end to the end of the file."""
    found, wrong, spans, now = {}, [], [], stamp(path)
    for name, value in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
            wrong.append(f"tensor {name!r} has no dtype, shape and data_offsets: it is {str(value)[:60]}")
            continue
        shape, offsets, code = value["shape"], value["data_offsets"], value["dtype"]
        if not _sizes(shape):
            wrong.append(f"tensor {name!r} has shape {str(shape)[:60]}, which is no list of sizes")
        elif not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            wrong.append(f"tensor {name!r} lies at {str(offsets)[:60]}, which is no start and end")
        else:
            start, end = offsets
            spans.append((start, end, name))
            dtype = NAMES.get(code) if isinstance(code, str) else None
            if dtype is None:
                wrong.append(f"tensor {name!r} has dtype {str(code)[:60]}, which no model here is made of")
                continue
            entry = Entry(path, dtype, tuple(shape), begin + start, now)
            if end - start != entry.nbytes:
                wrong.append(f"tensor {name!r} has {end - start} bytes, {entry.nbytes} for its shape and dtype")
            elif begin + end > size:
                wrong.append(f"tensor {name!r} ends at byte {begin + end} of {size}: the file is truncated")
            else:
                found[name] = entry
    if not wrong:
        at, before = 0, "the header"
        for start, end, name in sorted(spans):
            if start != at:
                what = "overlaps" if start < at else f"lies {start - at} bytes behind"
                wrong.append(f"tensor {name!r} at {start} .. {end} {what} {before}, which ends at {at}")
            at, before = max(at, end), f"tensor {name!r}"
        if not wrong and begin + at != size:
            wrong.append(f"{size - begin - at} bytes follow after the last tensor")
    return found, wrong


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def write(path: Path, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[Tensor]) -> None:
    """Writes a file to the disk, holding one tensor at a time.

    Args:
        path: where to.
        shapes: dtype and shape of each tensor, in order.
        tensors: their values, in the same order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in shapes.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors:
            file.write(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
