"""Where a parameter lies in the tensors of a file: which of them, which part, and in what order of dims."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Window = tuple[int, int]
Read = Callable[[str, tuple[slice, ...]], Tensor]


def _dims(side: str) -> list[list[str]]:
    """`"(h d) e"` -> `[["h", "d"], ["e"]]`."""
    out: list[list[str]] = []
    group: list[str] | None = None
    for token in side.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            group = []
        elif token == ")":
            out.append(group or [])
            group = None
        elif group is not None:
            group.append(token)
        else:
            out.append([token])
    return out


@dataclass(frozen=True)
class Part:
    """A parameter as a rectangular part of file tensors, its dims regrouped and permuted.

    Args:
        names: the file tensors. Several are one for each index of the parameter's first dim.
        pattern: dims of a file tensor, `->`, dims of the parameter (without the first one where there are several
            tensors). A file dim `(h d)` is made up of two, major first; each is a dim of the parameter, or one that
            `window` narrows to a single index.
        sizes: of every factor, in the file.
        window: for factors of which the parameter is only a part, its start and end.

    >>> part = Part(("q.weight",), "(h d) e -> e h d", {"h": 2, "d": 3, "e": 4})
    >>> part.file_shape, part.shape
    ((6, 4), (4, 2, 3))
    """

    names: tuple[str, ...]
    pattern: str
    sizes: Mapping[str, int]
    window: Mapping[str, Window] = field(default_factory=dict)

    @property
    def file_dims(self) -> list[list[str]]:
        """The factors of each dim of a file tensor."""
        return _dims(self.pattern.partition("->")[0])

    @property
    def dims(self) -> list[str]:
        """The factor that each dim of the parameter is, without the one that stacks tensors."""
        return [f for (f,) in _dims(self.pattern.partition("->")[2])]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of each file tensor."""
        return tuple(math.prod(self.sizes[f] for f in dim) for dim in self.file_dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        inner = tuple(b - a for a, b in (self._window(f) for f in self.dims))
        return inner if len(self.names) == 1 else (len(self.names), *inner)

    def _window(self, factor: str) -> Window:
        return self.window.get(factor, (0, self.sizes[factor]))

    def _ranges(self, slices: Sequence[slice]) -> dict[str, Window]:
        """For each factor the part that is wanted, as bounds in the file."""
        out = {f: self._window(f) for dim in self.file_dims for f in dim}
        for f, s in zip(self.dims, slices, strict=True):
            first, last = out[f]
            lo, hi, _ = s.indices(last - first)
            out[f] = (first + lo, first + max(lo, hi))
        return out

    def read(self, get: Read, slices: Sequence[slice] | None = None) -> Tensor:
        """A part of the parameter, reading no more of the files than rows that hold it.

        Args:
            get: gives a slice of the file tensor of a name.
            slices: one for each dim of the parameter; None for the whole.
        """
        wanted = list(slices) if slices is not None else [slice(None)] * len(self.shape)
        if len(self.names) == 1:
            return self._read_one(get, self.names[0], wanted)
        rows = [self._read_one(get, name, wanted[1:]) for name in self.names[wanted[0]]]
        return torch.stack(rows) if rows else self._read_one(get, self.names[0], wanted[1:])[None][:0]

    def _read_one(self, get: Read, name: str, slices: Sequence[slice]) -> Tensor:
        ranges = self._ranges(slices)
        bounds, shape, order = [], [], []
        for dim in self.file_dims:
            inner = math.prod(self.sizes[f] for f in dim[1:])
            lo, hi = ranges[dim[0]]
            bounds.append(slice(lo * inner, hi * inner))
            shape += [hi - lo, *(self.sizes[f] for f in dim[1:])]
            order += dim
        x = get(name, tuple(bounds)).reshape(shape)
        minor = {f for dim in self.file_dims for f in dim[1:]}
        for i, f in enumerate(order):
            if f in minor:
                x = x.narrow(i, ranges[f][0], ranges[f][1] - ranges[f][0])
        dropped = [i for i, f in enumerate(order) if f not in self.dims]
        left = [f for f in order if f in self.dims]
        return x.squeeze(dropped).permute([left.index(f) for f in self.dims])

    def write(self, value: Tensor, name: str, into: Tensor) -> None:
        """Puts the parameter's part of the file tensor of a name in its place.

        Args:
            value: the whole parameter.
            name: one of `names`.
            into: the whole file tensor, contiguous.
        """
        order = [f for dim in self.file_dims for f in dim]
        x = into.view([self.sizes[f] for f in order])
        for d, f in enumerate(order):
            lo, hi = self._window(f)
            x = x.narrow(d, lo, hi - lo)
        own = value if len(self.names) == 1 else value[self.names.index(name)]
        moved = own.permute([self.dims.index(f) for f in order if f in self.dims])
        x.copy_(moved.reshape(x.shape))


def whole(name: str, *sizes: int) -> Part:
    """A parameter that is a file tensor as it is.

    >>> whole("norm.weight", 8).shape
    (8,)
    """
    letters = "abcdefgh"[: len(sizes)]
    return Part((name,), f"{' '.join(letters)} -> {' '.join(letters)}", dict(zip(letters, sizes, strict=True)))


def turned(name: str, out: int, inputs: int) -> Part:
    """A weight `[in, out]` that the file holds as `[out, in]`.

    >>> turned("up.weight", 6, 4).shape
    (4, 6)
    """
    return Part((name,), "o i -> i o", {"o": out, "i": inputs})
