"""Safetensors files, read a part at a time and written a tensor at a time."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
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
    """The tensors of a file, and one clause for each thing that is wrong with it.

    The header is checked by the safetensors library first: offsets that overlap, leave holes, or don't fit the shapes.
    """
    if not path.is_file():
        return {}, ["it is no regular file"]
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            return {}, ["it is a pointer of git-lfs, not the weights: git lfs pull"]
        length = int.from_bytes(start, "little")
        if size < 8 or length > size - 8:
            return {}, [
                f"its header of {length} bytes does not fit in {size} bytes: it is truncated, or no safetensors"
            ]
        try:
            header = json.loads(file.read(length), object_pairs_hook=_once)
        except (ValueError, RecursionError) as e:
            return {}, [f"its header is not JSON that names each tensor once ({e}): it is no safetensors file"]
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError, ValueError) as e:
        ends = [v["data_offsets"][1] for v in _offsets(header)]
        short = ends and 8 + length + max(ends) > size
        return {}, [f"the file is truncated: {e}" if short else f"the safetensors library refuses it: {e}"]
    found, wrong = {}, []
    for name, value in header.items():
        if name == "__metadata__":
            continue
        dtype = NAMES.get(value["dtype"])
        if dtype is None:
            wrong.append(f"tensor {name!r} has dtype {value['dtype']}, which torch lacks")
        else:
            found[name] = Entry(path, dtype, tuple(value["shape"]), 8 + length + value["data_offsets"][0])
    return found, wrong


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [k for k, _ in pairs]
    twice = sorted({k for k in names if names.count(k) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"{twice[0]!r} stands there twice")
    return dict(pairs)


def _offsets(header: Any) -> list[Any]:
    """The entries of a header that have two offsets, as far as it can be read."""
    values = header.values() if isinstance(header, dict) else []
    return [v for v in values if isinstance(v, dict) and _two_numbers(v.get("data_offsets"))]


def _two_numbers(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and all(type(n) is int for n in x)


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
