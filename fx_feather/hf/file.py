"""Safetensors files, read a part at a time and written a tensor at a time."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: where its bytes begin, and what they are."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, slices: Sequence[slice]) -> Tensor:
        """A rectangular part: only rows that hold it are read, and no more than it and one chunk is held at a time.

        A file is read rather than mapped, since mapped pages count as memory of the process.
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
        raise EOFError(f"{file.name} ends {len(flat) - got} bytes too early")


def entries(path: Path) -> tuple[dict[str, Entry], list[str]]:
    """The tensors of a file, and one clause for each thing that is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            return {}, [
                f"its header of {length} bytes does not fit in {size} bytes: it is truncated, or no safetensors"
            ]
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return {}, ["its header is not JSON: it is no safetensors file"]
    found, wrong = {}, []
    for name, value in header.items():
        if name == "__metadata__":
            continue
        dtype, (start, end) = NAMES.get(value["dtype"]), value["data_offsets"]
        if dtype is None:
            wrong.append(f"tensor {name!r} has dtype {value['dtype']}, which torch lacks")
            continue
        entry = Entry(path, dtype, tuple(value["shape"]), 8 + length + start)
        if end - start != entry.nbytes:
            wrong.append(f"tensor {name!r} has {end - start} bytes, {entry.nbytes} for its shape and dtype")
        elif 8 + length + end > size:
            wrong.append(f"tensor {name!r} ends at byte {8 + length + end} of {size}: the file is truncated")
        else:
            found[name] = entry
    return found, wrong


def write(path: Path, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[Tensor]) -> None:
    """Writes a file, holding one tensor at a time.

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
