"""Resharding: the typed collectives that bring a value from one type to another, never changing what it means."""

import dataclasses
import functools as ft
from collections.abc import Sequence

import torch

from .. import collectives as cc
from ..errors import SpecError, fail
from ..mesh import Mesh
from ..spec import Type, local_size, pad_to


@dataclasses.dataclass(frozen=True)
class Step:
    """One typed collective of a conversion, with the local sizes of the dim around it.

    `before` and `after` are the local size of `dim` that the collective's operand is padded to, and that its result
    is cut to; they differ from what it has where parts are uneven.
    """

    name: str
    axes: tuple[str, ...]
    dim: int | None = None
    before: int = 0
    after: int = 0
    concat_dim: int | None = None

    def __repr__(self) -> str:
        where = "" if self.dim is None else f", dim={self.dim}"
        if self.concat_dim is not None:
            where += f", concat_dim={self.concat_dim}"
        return f"{self.name}({','.join(self.axes)}{where})"


@ft.cache
def steps(src: Type, dst: Type, mesh: Mesh) -> tuple[Step, ...]:
    """The collectives from `src` to `dst`, in order.

    Partial sums are reduced first (straight to the split that is wanted where possible), dims are then joined, moved
    and split, and at last R and I are settled.

    Raises:
        SpecError: the two types are of different shapes.
    """
    if src.shape != dst.shape:
        fail(
            SpecError,
            call=f"convert({src} -> {dst})",
            got=f"shapes {list(src.shape)} and {list(dst.shape)}",
            number=f"shape {list(src.shape)} is not {list(dst.shape)}",
            rule="a conversion changes how a value is split, not what it is",
            fix="reshape the value first",
        )
    out: list[Step] = []
    dims, partial, replicated = [list(d) for d in src.dims], set(src.partial), set(src.replicated)

    def size(d: int) -> int:
        return local_size(src.shape[d], dims[d], mesh)

    # 1. Pending sums. One that ends up split on a dim is scattered to it at once, if that dim is ready for it.
    resolve = [a for a in mesh.axes if a in partial and a not in dst.partial]
    for d, want in enumerate(dst.dims):
        run: list[str] = []
        while len(dims[d]) + len(run) < len(want) and want[: len(dims[d])] == tuple(dims[d]):
            a = want[len(dims[d]) + len(run)]
            if a not in resolve:
                break
            run.append(a)
        if run:
            k = mesh.count(tuple(run))
            inner = local_size(size(d), run, mesh)
            if inner * k == size(d) or len(run) == 1:
                out.append(Step("reduce_scatter", tuple(run), d, inner * k, inner))
                dims[d] += run
            else:
                # Nested parts of an uneven dim are not the parts of the joint group: one axis at a time.
                for a in run:
                    inner = local_size(size(d), (a,), mesh)
                    out.append(Step("reduce_scatter", (a,), d, inner * mesh[a], inner))
                    dims[d].append(a)
            resolve = [a for a in resolve if a not in run]
            partial -= set(run)
    if resolve:
        out.append(Step("psum", tuple(resolve)))
        partial -= set(resolve)

    # 2. Dims: drop the axes that do not lead to the wanted split, the minor ones first.
    for d, want in enumerate(dst.dims):
        keep = 0
        while keep < min(len(want), len(dims[d])) and want[keep] == dims[d][keep]:
            keep += 1
        while len(dims[d]) > keep:
            a = dims[d][-1]
            other = dst.dim_of(a)
            if other is not None and other != d:
                ready = dst.dims[other][: len(dims[other]) + 1] == (*dims[other], a)
                even = size(other) % mesh[a] == 0 and size(d) * mesh[a] == local_size(src.shape[d], dims[d][:-1], mesh)
                if ready and even:
                    out.append(Step("all_to_all", (a,), other, concat_dim=d))
                    dims[d].pop()
                    dims[other].append(a)
                    continue
            invariant = dst.state(a) == "I"
            run = [a]
            while len(dims[d]) - len(run) > keep:
                b = dims[d][-1 - len(run)]
                outer = local_size(src.shape[d], dims[d][: len(dims[d]) - len(run) - 1], mesh)
                joint = size(d) * mesh.count((b, *run)) == outer
                elsewhere = dst.dim_of(b) not in (None, d)
                if not joint or elsewhere or (dst.state(b) == "I") != invariant:
                    break
                run.insert(0, b)
            outer = local_size(src.shape[d], dims[d][: len(dims[d]) - len(run)], mesh)
            out.append(Step("all_gather_invariant" if invariant else "all_gather", tuple(run), d, size(d), outer))
            del dims[d][len(dims[d]) - len(run) :]
            if not invariant:
                replicated |= set(run)

    # 3. Split further what is whole.
    for d, want in enumerate(dst.dims):
        for a in want[len(dims[d]) :]:
            name = "pscatter_replicated" if a in replicated else "pscatter"
            inner = local_size(size(d), (a,), mesh)
            out.append(Step(name, (a,), d, inner * mesh[a], inner))
            dims[d].append(a)
            replicated.discard(a)

    # 4. What is the same everywhere: as an invariant, replicated, or as one part of a sum.
    used = {a for d in dims for a in d}
    same = [a for a in mesh.axes if a not in used and a not in partial]
    groups: dict[str, list[str]] = {}
    for a in same:
        now, want_state = "R" if a in replicated else "I", dst.state(a)
        change = {
            ("I", "R"): "pvary",
            ("R", "I"): "unvary",
            ("I", "partial"): "keep_first",
            ("R", "partial"): "keep_first_replicated",
        }.get((now, want_state))
        if change:
            groups.setdefault(change, []).append(a)
    out += [Step(name, tuple(axes)) for name, axes in groups.items()]
    return tuple(out)


def _resized(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    if x.shape[dim] > size:
        return x.narrow(dim, 0, size)
    return pad_to(x, tuple(size if i == dim else n for i, n in enumerate(x.shape)))


def take(x: torch.Tensor, step: Step, mesh: Mesh, grad_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Applies one step to a local value."""
    n = mesh.count(step.axes)
    match step.name:
        case "psum" | "pvary":
            return getattr(cc, step.name)(x, step.axes, n, grad_dtype)
        case "unvary" | "keep_first" | "keep_first_replicated":
            return getattr(cc, step.name)(x, step.axes, n)
        case "all_to_all":
            assert step.dim is not None and step.concat_dim is not None
            return cc.all_to_all(x, step.axes, n, step.dim, step.concat_dim)
    assert step.dim is not None
    x = _resized(x, step.dim, step.before)
    if step.name in ("all_gather", "reduce_scatter"):
        x = getattr(cc, step.name)(x, step.axes, n, step.dim, grad_dtype)
    else:
        x = getattr(cc, step.name)(x, step.axes, n, step.dim)
    return _resized(x, step.dim, step.after)


def convert(x: torch.Tensor, src: Type, dst: Type, mesh: Mesh) -> torch.Tensor:
    """The local part of the same global value under another type.

    Args:
        x: the local part under `src`, of shape `src.local_shape(mesh)`.
        src: the type it has.
        dst: the type wanted, of the same global shape.
        mesh: the ranks.
    """
    for step in steps(src, dst, mesh):
        x = take(x, step, mesh)
    return x


def convert_all(xs: Sequence[torch.Tensor], pairs: Sequence[tuple[Type, Type]], mesh: Mesh) -> list[torch.Tensor]:
    """Converts many values, those that need the same collective next together, in one flat buffer.

    Moved values keep their bits. Sums of more than two ranks are as exact in any buffer, but a ring adds in an order
    that depends on the place in it; in shared memory they are added in the order of the ranks.

    A change of dtype comes first: what travels is what is asked for. Values of different dtypes travel apart. Many
    values that are alike are converted as one stack: they are small, or they would not share a buffer, and operators
    on each of them would take longer to build and to start than to run.
    """
    alike: dict[tuple[torch.dtype, tuple[Type, Type]], list[int]] = {}
    for i, (x, pair) in enumerate(zip(xs, pairs, strict=True)):
        alike.setdefault((x.dtype, pair), []).append(i)
    stacks = sorted(at for i in alike.values() for at in ([i] if len(i) >= _MANY else [[k] for k in i]))
    out, stacked, types = list(xs), [], []
    for at in stacks:
        src, dst = pairs[at[0]]
        one = len(at) == 1
        stacked.append((xs[at[0]] if one else torch.stack([xs[i] for i in at])).to(dst.dtype))
        types.append((src, dst) if one else (src.stacked(len(at)), dst.stacked(len(at))))
    for at, x in zip(stacks, _convert_each(stacked, types, mesh), strict=True):
        for i, part in zip(at, [x] if len(at) == 1 else x.unbind(0), strict=True):
            out[i] = part
    return out


_MANY = 4


def _convert_each(xs: Sequence[torch.Tensor], pairs: Sequence[tuple[Type, Type]], mesh: Mesh) -> list[torch.Tensor]:
    out = list(xs)
    plans = [list(steps(src, dst, mesh)) for src, dst in pairs]
    while any(plans):
        groups: dict[tuple[str, tuple[str, ...], torch.dtype], list[int]] = {}
        for i, plan in enumerate(plans):
            if plan:
                groups.setdefault((plan[0].name, plan[0].axes, out[i].dtype), []).append(i)
        # The largest group first: others may still come to join the rest.
        (name, axes, _), members = max(groups.items(), key=lambda kv: len(kv[1]))
        heads = [plans[i].pop(0) for i in members]
        if name in _FLAT and len(members) > 1:
            results = _FLAT[name]([out[i] for i in members], heads, axes, mesh)
        else:
            results = [take(out[i], s, mesh) for i, s in zip(members, heads, strict=True)]
        for i, r in zip(members, results, strict=True):
            out[i] = r
    return out


def _split_flat(flat: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(flat.split_with_sizes(sizes, dim=-1))


def _flat_psum(xs: list[torch.Tensor], heads: list[Step], axes: tuple[str, ...], mesh: Mesh) -> list[torch.Tensor]:
    flat = cc.psum(torch.cat([x.reshape(-1) for x in xs]), axes, mesh.count(axes))
    parts = _split_flat(flat, [x.numel() for x in xs])
    return [p.view(x.shape) for p, x in zip(parts, xs, strict=True)]


def _flat_gather(xs: list[torch.Tensor], heads: list[Step], axes: tuple[str, ...], mesh: Mesh) -> list[torch.Tensor]:
    n = mesh.count(axes)
    flat = cc.all_gather_invariant(torch.cat([x.reshape(-1) for x in xs]), axes, n, 0).view(n, -1)
    out = []
    for part, x, step in zip(_split_flat(flat, [x.numel() for x in xs]), xs, heads, strict=True):
        d = step.dim or 0
        shape = list(x.shape)
        shape[d] *= n
        whole = part.view(n, *x.shape).movedim(0, d).reshape(shape)
        out.append(_resized(whole, d, step.after))
    return out


def _flat_reduce_scatter(
    xs: list[torch.Tensor], heads: list[Step], axes: tuple[str, ...], mesh: Mesh
) -> list[torch.Tensor]:
    n = mesh.count(axes)
    rows, shapes = [], []
    for x, step in zip(xs, heads, strict=True):
        d = step.dim or 0
        x = _resized(x, d, step.before)
        shape = list(x.shape)
        shape[d] //= n
        rows.append(x.reshape(*shape[:d], n, *shape[d:]).movedim(d, 0).reshape(n, -1))
        shapes.append(shape)
    flat = cc.reduce_scatter(torch.cat(rows, dim=1), axes, n, 0).view(-1)
    parts = _split_flat(flat, [r.shape[1] for r in rows])
    return [p.view(s) for p, s in zip(parts, shapes, strict=True)]


_FLAT = {
    "psum": _flat_psum,
    "all_gather": _flat_gather,
    "all_gather_invariant": _flat_gather,
    "reduce_scatter": _flat_reduce_scatter,
}
