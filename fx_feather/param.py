"""Parameters as templates: dim names, shape and initial values, which are the same bits in every layout."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import tree
from .errors import ShapeError, fail, message, raise_all
from .initializers import Initializer as Initializer
from .initializers import given as given
from .initializers import normal as normal
from .initializers import ones as ones
from .initializers import truncated_normal as truncated_normal
from .initializers import uniform as uniform
from .initializers import zeros as zeros

BLOCK = 65536
"""Elements that one generator draws: the unit in which initial values are made, whatever part is asked for."""

_SKIP_BITS = 12


@dataclass(frozen=True)
class Param:
    """What a parameter is before it has values: a leaf of the template pytree.

    Args:
        dims: a name for each dim, separated by spaces, `_` for a dim that no layout splits.
        shape: the whole shape, before any splitting.
        init: the rule for its initial values.
        dtype: the dtype in which it rests.

    Raises:
        ShapeError: dims, shape, init or dtype that do not fit together; all of them at once.

    >>> Param("embed mlp", (8, 32))
    Param('embed mlp', (8, 32), init=normal(std=0.02), dtype=torch.float32)
    >>> Param("embed mlp", (8, 32)).dim_names
    ('embed', 'mlp')
    """

    dims: str
    shape: tuple[int, ...]
    init: Initializer = normal(0.02)  # noqa: RUF009 (frozen, so it may be shared)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if isinstance(self.shape, Sequence) and not isinstance(self.shape, str):
            object.__setattr__(self, "shape", tuple(self.shape))
        raise_all(ShapeError, [message(call=repr(self), **parts) for parts in self._problems()])

    def __repr__(self) -> str:
        return f"Param({self.dims!r}, {self.shape!r}, init={self.init!r}, dtype={self.dtype})"

    @property
    def dim_names(self) -> tuple[str, ...]:
        """The name of each dim."""
        return tuple(self.dims.split())

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    def _problems(self) -> Iterator[dict[str, str]]:
        names = tuple(self.dims.split()) if isinstance(self.dims, str) else None
        shape = self.shape if isinstance(self.shape, tuple) else None
        if names is None:
            yield {
                "got": f"dims of type {type(self.dims).__name__}",
                "number": f"dims is {self.dims!r}, which is not a string",
                "rule": "dims is one string, a name for each dim, separated by spaces",
                "fix": 'dims="embed mlp"',
            }
        for name in names or ():
            if not name.isidentifier():
                yield {
                    "got": f"dims {self.dims!r}",
                    "number": f"{name!r} is not a name",
                    "rule": "a dim name is an identifier, or `_` for a dim that no layout splits",
                    "fix": 'names and spaces only, such as dims="embed mlp"',
                }
        for name in sorted({n for n in names or () if n != "_" and (names or ()).count(n) > 1}):
            yield {
                "got": f"dims {self.dims!r}",
                "number": f"{name!r} names {(names or ()).count(name)} dims",
                "rule": "one name stands for one dim of a tensor, since a layout splits by name",
                "fix": "another name, or `_`, for all but one of them",
            }
        if shape is None or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
            yield {
                "got": f"shape {self.shape!r}",
                "number": f"shape {self.shape!r} is not a sequence of integers of at least 0",
                "rule": "a shape is the whole size of each dim",
                "fix": "shape=(8, 32)",
            }
        elif names is not None and len(names) != len(shape):
            fill = " ".join([*names, *["_"] * len(shape)][: len(shape)])
            yield {
                "got": f"dims {self.dims!r} and shape {shape}",
                "number": f"{len(names)} dim names for {len(shape)} dims",
                "rule": "each dim has one name, `_` where no layout splits it",
                "fix": f"dims={fill!r}, or a shape of {len(names)} dims",
            }
        if not callable(getattr(self.init, "block", None)) or isinstance(self.init, type):
            yield {
                "got": f"init {self.init!r}",
                "number": f"{self.init!r} has no method block(generator, n, dtype), or is not called",
                "rule": "initial values are made in blocks by the initialiser",
                "fix": "init=ff.normal(0.02), or zeros(), ones(), uniform(low, high), truncated_normal(std)",
            }
        if isinstance(self.init, given) and tuple(self.init.values.shape) != shape:
            yield {
                "got": f"init={self.init!r} and shape {shape}",
                "number": f"values of shape {tuple(self.init.values.shape)} for a parameter of shape {shape}",
                "rule": "given values are those of the whole parameter",
                "fix": f"shape={tuple(self.init.values.shape)}, or values of the parameter's shape",
            }
        random = isinstance(self.init, normal | truncated_normal | uniform)
        if not isinstance(self.dtype, torch.dtype) or (random and not self.dtype.is_floating_point):
            yield {
                "got": f"dtype {self.dtype!r}",
                "number": f"{self.dtype!r} is not a floating-point torch.dtype",
                "rule": "random initial values need a floating-point dtype",
                "fix": "dtype=torch.float32",
            }


def init(template: tree.Tree, seed: int = 0) -> tree.Tree:
    """The initial values of every parameter of a template, as whole tensors.

    The values are a function of the seed, the parameter's path and shape, and nothing else: see `initial_values`.

    Raises:
        ShapeError: leaves that are no Param; all of them at once.

    >>> params = init({"scale": Param("embed", (3,), ones()), "up": Param("embed mlp", (3, 4))})
    >>> params["scale"], params["up"].shape
    (tensor([1., 1., 1.]), torch.Size([3, 4]))
    """
    check_template(template, call="init(template)")
    return tree.map_with_path(lambda path, param: initial_values(param, path, seed), template)


def check_template(template: tree.Tree, *, call: str) -> None:
    """Raises ShapeError naming every leaf of a template that is no Param."""
    leaves = tree.leaves(template)
    if all(type(x) is Param for x in leaves):
        return
    wrong = [(p, x) for p, x in zip(tree.paths(template), leaves, strict=True) if type(x) is not Param]
    raise_all(
        ShapeError,
        [
            message(
                call=f"{call}, at template{path}",
                got=f"a leaf of type {type(leaf).__name__}",
                number=f"template{path} is not a Param",
                rule="a template is a pytree whose leaves are all ff.Param",
                fix=tree.as_node(leaf, f'template{path} = ff.Param("dim names", shape)'),
            )
            for path, leaf in wrong
        ],
    )


def initial_block(param: Param, path: str, seed: int, index: int) -> Tensor:
    """Block `index` of a parameter's initial values: elements from `index * BLOCK` on, in row-major order.

    Each block has a generator of its own, seeded by a hash of the seed, the path and the index. Returns a 1-D tensor
    of BLOCK elements, fewer in the last block.
    """
    n = min(BLOCK, param.numel - index * BLOCK)
    if isinstance(param.init, given):
        return param.init.at(index * BLOCK, n, param.dtype)
    generator = torch.Generator(device="cpu")
    if not isinstance(param.init, zeros | ones):
        key = f"{seed}\0{path}\0{index}".encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        # The Mersenne twister keeps 32 bits of its seed, few enough for two blocks of a large model to collide.
        # Further bits choose how many draws are skipped, so that such a pair would still hold different values.
        generator.manual_seed(number & 0xFFFFFFFF)
        torch.empty(number >> (64 - _SKIP_BITS), dtype=torch.int32, device="cpu").random_(generator=generator)
    values = param.init.block(generator, n, param.dtype)
    if values.shape != (n,) or values.dtype != param.dtype:
        fail(
            ShapeError,
            call=f"{param.init!r}.block(generator, {n}, {param.dtype}) for params{path}",
            got=f"{values.dtype} of shape {tuple(values.shape)}",
            number=f"shape {tuple(values.shape)} and {values.dtype}, where ({n},) and {param.dtype} are asked for",
            rule="an initialiser returns a 1-D tensor of n values in the dtype it is given",
            fix="end block with `return values.reshape(n).to(dtype)`",
        )
    return values


def initial_values(param: Param, path: str, seed: int = 0, slices: Sequence[slice] | None = None) -> Tensor:
    """The initial values of a rectangular part of a parameter, equal bit for bit to that part of the whole.

    Only the blocks that the part touches are drawn, and no more than the part and one block is held at a time.

    Args:
        param: the template leaf.
        path: its key path in the template, such as `['layers'][3]['mlp']['up']`.
        seed: any integer.
        slices: a slice of step 1 for each dim; None for the whole.

    Raises:
        ShapeError: another number of slices than dims, or a step other than 1.

    >>> weight = Param("embed mlp", (4, 6))
    >>> part = initial_values(weight, "['up']", 0, (slice(0, 4), slice(2, 5)))
    >>> torch.equal(part, initial_values(weight, "['up']")[:, 2:5])
    True
    """
    wanted = tuple(slices) if slices is not None else (slice(None),) * len(param.shape)
    _check_slices(param, path, wanted)
    bounds = [(lo, max(lo, hi)) for lo, hi, _ in (s.indices(n) for s, n in zip(wanted, param.shape, strict=True))]
    out = torch.empty([hi - lo for lo, hi in bounds], dtype=param.dtype, device="cpu")
    position = _next_inside(param.shape, bounds, 0) if out.numel() else None
    while position is not None:
        index = position // BLOCK
        start = index * BLOCK
        values = initial_block(param, path, seed, index)
        for box in _boxes(param.shape, start, start + len(values)):
            _copy_box(out, values, param.shape, bounds, box, start)
        position = _next_inside(param.shape, bounds, start + BLOCK)
    return out


Box = list[tuple[int, int]]
"""Half-open bounds for each dim."""


def _next_inside(shape: Sequence[int], bounds: Box, position: int) -> int | None:
    """The first row-major index at or after `position` that lies within the bounds (none of them empty)."""
    if position >= math.prod(shape):
        return None
    at, rest = [0] * len(shape), position
    for d in reversed(range(len(shape))):
        rest, at[d] = divmod(rest, shape[d])
    outside = next((d for d, (lo, hi) in enumerate(bounds) if not lo <= at[d] < hi), len(shape))
    if outside < len(shape) and at[outside] >= bounds[outside][1]:
        # Past the end in this dim: carry into the nearest outer dim that has room.
        room = next((d for d in reversed(range(outside)) if at[d] + 1 < bounds[d][1]), None)
        if room is None:
            return None
        at[room] += 1
        outside = room + 1
    at[outside:] = [lo for lo, _ in bounds[outside:]]
    index = 0
    for size, i in zip(shape, at, strict=True):
        index = index * size + i
    return index


def _boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """Cuts the row-major interval from `start` to `end` into boxes, at most two a dim, in order."""
    if start >= end:
        return
    if not shape:
        yield []
        return
    inner, rest = math.prod(shape[1:]), shape[1:]
    (first, head), (last, tail) = divmod(start, inner), divmod(end, inner)
    if first == last:
        yield from ([(first, first + 1), *box] for box in _boxes(rest, head, tail))
        return
    if head:
        yield from ([(first, first + 1), *box] for box in _boxes(rest, head, inner))
        first += 1
    if first < last:
        yield [(first, last), *((0, n) for n in rest)]
    yield from ([(last, last + 1), *box] for box in _boxes(rest, 0, tail))


def _copy_box(out: Tensor, values: Tensor, shape: Sequence[int], bounds: Box, box: Box, start: int) -> None:
    """Copies what `box`, a contiguous piece of the block that begins at `start`, shares with the wanted part."""
    common = [(max(a, lo), min(b, hi)) for (a, b), (lo, hi) in zip(box, bounds, strict=True)]
    if any(a >= b for a, b in common):
        return
    first = 0
    for size, (a, _) in zip(shape, box, strict=True):
        first = first * size + a
    sizes = [b - a for a, b in box]
    piece = values[first - start : first - start + math.prod(sizes)].view(sizes)
    here = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(common, bounds, strict=True))
    there = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(common, box, strict=True))
    out[here].copy_(piece[there])


def _check_slices(param: Param, path: str, slices: tuple[slice, ...]) -> None:
    problems = []
    if len(slices) != len(param.shape):
        problems.append((f"{len(slices)} slices for {len(param.shape)} dims", "pass slice(None) for a whole dim"))
    for d, s in enumerate(slices):
        if s.step not in (None, 1):
            problems.append((f"the slice of dim {d} has step {s.step}", "take a step of 1, and index the result"))
    raise_all(
        ShapeError,
        [
            message(
                call=f"initial_values at params{path}",
                got=f"{param!r} and slices {slices}",
                number=number,
                rule="a part is rectangular: one slice of step 1 a dim",
                fix=fix,
            )
            for number, fix in problems
        ],
    )
