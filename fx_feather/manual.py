"""Collectives written by hand: inside of a manual region they name mesh axes, and are recorded with their full type."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .collectives.permute import check_perm
from .collectives.primitive import COLLECTIVES, LIBRARY, checked_dims, find, refuse_vjp
from .errors import MeshError, ShapeError, fail, message, raise_all
from .mesh import Axes, Mesh, as_axes

# In a manual region a collective is first recorded with its full name: two may share one operator.
LIBRARY.define("typed(Tensor x, str name, str axes, int n, int[] static, ScalarType? grad_dtype) -> Tensor")
TYPED = torch.ops.fx_feather.typed.default


def _typed_fake(x: torch.Tensor, name: str, axes: str, n: int, static: list[int], grad_dtype: Any) -> torch.Tensor:
    c = COLLECTIVES[name]
    if c.op is None:
        return torch.empty_like(x)
    return c.fake(x, axes, n, *([static] if c.static == ("perm",) else static))


LIBRARY.impl("typed", _typed_fake, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::typed", _typed_fake, lib=LIBRARY)


@dataclasses.dataclass(frozen=True)
class Context:
    """The region that is being traced."""

    mesh: Mesh
    device: str


_region: Context | None = None


class Record(torch.autograd.Function):
    """Records a typed collective by name; its backward records the dual, so a vjp inside of a region is right too."""

    @staticmethod
    def forward(x: torch.Tensor, name: str, axes: str, n: int, static: Any, grad_dtype: Any) -> torch.Tensor:
        # In here torch turns gradients off, which says nothing of the operator itself.
        with torch.enable_grad():
            out: torch.Tensor = TYPED(x, name, axes, n, list(static), grad_dtype)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, *ctx.rest = inputs

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:
        name, axes, n, static, grad_dtype = ctx.rest
        c = COLLECTIVES[name]
        if c.vjp is None:
            refuse_vjp(name, axes, n, named(name, static), ct)
        own = named(c.name, static)
        dual = COLLECTIVES[c.vjp]
        back = c.vjp_static(own)
        flat = tuple(back["perm"]) if "perm" in back else tuple(back[k] for k in dual.static)
        return Record.apply(ct, dual.name, axes, n, flat, grad_dtype), None, None, None, None, None


def named(name: str, static: Sequence[int]) -> dict[str, Any]:
    names = COLLECTIVES[name].static
    return {"perm": list(static)} if names == ("perm",) else dict(zip(names, static, strict=True))


def check_tensors(values: Sequence[Any], *, call: str, what: str) -> None:
    """Raises ShapeError for values that are no tensors, all at once."""
    raise_all(
        ShapeError,
        [
            message(
                call=call,
                got=f"{what} of type {type(x).__name__}",
                number=f"{x!r} is not a tensor",
                rule="what goes in and out of per-rank code and its collectives is tensors, each with a state",
                fix="torch.as_tensor(...)",
            )
            for x in values
            if not isinstance(x, torch.Tensor)
        ],
    )


def _collective(name: str, x: torch.Tensor, axes: Axes, grad_dtype: torch.dtype | None = None, **static: Any) -> Any:
    if _region is None:
        fail(
            MeshError,
            call=f"ff.{name}(x, {axes!r})",
            got="a call outside of any manual region",
            number="no mesh is known here",
            rule="a collective that is written by hand belongs into per-rank code, which names the mesh",
            fix="ff.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)(x), with the collective inside of f",
        )
    check_tensors([x], call=f"ff.{name}(x, {axes!r})", what="an operand")
    c, mesh = find(name), _region.mesh
    names = as_axes(axes)
    mesh.check(names, call=f"ff.{name}(x, {axes!r})")
    n = mesh.count(names)
    shown = "".join(f", {k}={v}" for k, v in static.items())
    static = checked_dims(c, x, names, n, static, f"ff.{name}(x, {axes!r}{shown}) on {mesh!r}")
    flat = tuple(static["perm"]) if "perm" in static else tuple(static[k] for k in c.static)
    out = Record.apply(x, name, ",".join(names), n, flat, grad_dtype)
    return out if torch.is_grad_enabled() else out.detach()


def psum(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """varying -> invariant: the sum over the axes, on every rank (NCCL all-reduce). Its vjp is `pvary`."""
    return _collective("psum", x, axes)


def pmax(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """varying -> invariant: the largest over the axes, on every rank (NCCL all-reduce, max). It has no vjp."""
    return _collective("pmax", x, axes)


def pvary(x: torch.Tensor, axes: Axes, grad_dtype: torch.dtype | None = None) -> torch.Tensor:
    """invariant -> varying: the same value, from here on each rank's own. Its vjp is `psum`.

    Where an invariant value meets a varying one this is done by itself; write it to share one sum between uses.
    """
    return _collective("pvary", x, axes, grad_dtype)


def all_gather(x: torch.Tensor, axes: Axes, *, dim: int, grad_dtype: torch.dtype | None = None) -> torch.Tensor:
    """varying -> varying: all parts joined along `dim` (NCCL all-gather). Its vjp is `reduce_scatter`."""
    return _collective("all_gather", x, axes, grad_dtype, dim=dim)


def all_gather_invariant(x: torch.Tensor, axes: Axes, *, dim: int) -> torch.Tensor:
    """varying -> invariant: all parts joined along `dim`, and used alike by all. Its vjp takes the own part."""
    return _collective("all_gather_invariant", x, axes, dim=dim)


def reduce_scatter(x: torch.Tensor, axes: Axes, *, dim: int, grad_dtype: torch.dtype | None = None) -> torch.Tensor:
    """varying -> varying: the own part of the sum (NCCL reduce-scatter). Its vjp is `all_gather`."""
    return _collective("reduce_scatter", x, axes, grad_dtype, dim=dim)


def pscatter(x: torch.Tensor, axes: Axes, *, dim: int) -> torch.Tensor:
    """invariant -> varying: the own part of a value that all ranks have. Its vjp is `all_gather_invariant`."""
    return _collective("pscatter", x, axes, dim=dim)


def all_to_all(x: torch.Tensor, axes: Axes, *, split_dim: int, concat_dim: int) -> torch.Tensor:
    """varying -> varying: split on `concat_dim` before, on `split_dim` after (NCCL all-to-all). Its vjp swaps them."""
    return _collective("all_to_all", x, axes, split_dim=split_dim, concat_dim=concat_dim)


def ppermute(x: torch.Tensor, axes: Axes, perm: Sequence[tuple[int, int]]) -> torch.Tensor:
    """varying -> varying: sends to the destinations of `(source, destination)` pairs; zeros where nothing arrives."""
    if _region is not None:
        check_perm(as_axes(axes), _region.mesh.count(axes), perm)
    return _collective("ppermute", x, axes, perm=[i for pair in perm for i in pair])


def axis_index(axes: Axes) -> torch.Tensor:
    """The rank's position along the axes, the first one major: int64 scalar, varying."""
    if _region is None:
        return _collective("axis_index", torch.empty(0), axes)
    _region.mesh.check(as_axes(axes), call=f"ff.axis_index({axes!r})")
    names, n = ",".join(as_axes(axes)), _region.mesh.count(axes)
    out: torch.Tensor = torch.ops.fx_feather.axis_index(names, n, device=_region.device)
    return out


@contextlib.contextmanager
def inside(context: Context) -> Iterator[None]:
    global _region
    before, _region = _region, context
    try:
        yield
    finally:
        _region = before
