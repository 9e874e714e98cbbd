"""Property tests of one's own model: strategies for meshes, layouts and batches, and the law they are held to."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import tree
from .compile import compile, value_and_grad
from .compiled import BUCKET_BYTES
from .errors import FeatherError, fail, message
from .layout import PADDED_DIMS, Layout, Precision, Store
from .mesh import Mesh, as_axes
from .optim import Transform, apply_updates, global_norm, sgd
from .param import Param, init
from .spec import P
from .step import State, Step, compile_step

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Kind = Callable[[str], Layout]


def _zero(stage: int) -> Kind:
    def kind(axis: str) -> Layout:
        row = {"embed": axis}
        tables = [row if stage >= least else {} for least in (3, 2, 1)]
        return Layout(compute={"batch": axis}, store=Store(*tables))

    return kind


def _tensor(*dims: str) -> Kind:
    return lambda axis: Layout(compute=dict.fromkeys(dims, axis))


#: What one mesh axis may be used for, by the names of the layouts package; each takes the axis.
KINDS: Mapping[str, Kind] = {
    "single": lambda axis: Layout(),
    "ddp": _zero(0),
    "zero1": _zero(1),
    "zero2": _zero(2),
    "fsdp": _zero(3),
    "tp": _tensor("heads", "kv_heads", "mlp", "vocab"),
    "tp_sp": _tensor("heads", "kv_heads", "mlp", "vocab", "residual_seq"),
}


def _strategies() -> Any:
    try:
        import hypothesis.strategies
    except ImportError:
        fail(
            FeatherError,
            call="fx_feather.testing: a strategy",
            got="no package hypothesis in this environment",
            number="1 package is missing: hypothesis",
            rule="strategies are for tests alone, so hypothesis is no dependency of fx_feather itself",
            fix="pip install hypothesis",
        )
    return hypothesis.strategies


def meshes(max_size: int = 8, axes: Sequence[str] = ("dp", "tp"), min_size: int = 1) -> "SearchStrategy[Mesh]":
    """Meshes of some of the axes, in their order, with at most `max_size` ranks; they shrink to one rank.

    Args:
        max_size: ranks at most.
        axes: names; each is there or not.
        min_size: ranks at least.

    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: mesh.size >= 4 and "tp" in mesh)
    Mesh(tp=4)
    """
    st = _strategies()
    choices = []
    for k in range(len(axes) + 1):
        for names in itertools.combinations(axes, k):
            ranges = [range(2, max_size + 1)] * k
            choices += [
                Mesh(**dict(zip(names, sizes, strict=True)))
                for sizes in itertools.product(*ranges)
                if min_size <= math.prod(sizes) <= max_size
            ]
    return st.sampled_from(sorted(choices, key=lambda m: (m.size, len(m.axes))))


def compositions(
    mesh: Mesh, kinds: Mapping[str, Kind] = KINDS, sizes: Mapping[str, int] | None = None
) -> dict[str, Layout]:
    """Every way to use each axis of a mesh for one kind, by a name such as `fsdp@dp | tp@tp`.

    Args:
        mesh: the ranks.
        kinds: what an axis may be used for: functions of the axis, such as `{"fsdp": layouts.fsdp}`.
        sizes: of dims of the model and batch, by name. Layouts that would split one of them unevenly are left out.

    >>> list(compositions(Mesh(a=2, b=2), {"ddp": KINDS["ddp"], "tp": KINDS["tp"]}, {"heads": 2}))
    ['ddp@a | ddp@b', 'ddp@a | tp@b', 'tp@a | ddp@b']
    """
    out = {}
    for names in itertools.product(kinds, repeat=len(mesh.axes)):
        layout = Layout()
        for name, axis in zip(names, mesh.axes, strict=True):
            layout = layout | kinds[name](axis)
        uneven = [
            dim
            for dim, axes in layout.compute.items()
            if dim not in PADDED_DIMS and (sizes or {}).get(dim, 0) % mesh.count(as_axes(axes))
        ]
        if not uneven:
            text = " | ".join(f"{name}@{axis}" for name, axis in zip(names, mesh.axes, strict=True))
            out[text or "single"] = layout
    return out


def layouts(
    mesh: Mesh, kinds: Mapping[str, Kind] = KINDS, sizes: Mapping[str, int] | None = None
) -> "SearchStrategy[Layout]":
    """Layouts that use each axis of `mesh` for one kind; arguments as for `compositions`.

    >>> from hypothesis import find
    >>> find(layouts(Mesh(dp=2)), lambda layout: layout.store.params).compute
    {'batch': ('dp',)}
    """
    return _strategies().sampled_from(list(compositions(mesh, kinds, sizes).values()))


def parallelisms(
    max_size: int = 8,
    axes: Sequence[str] = ("dp", "tp"),
    kinds: Mapping[str, Kind] = KINDS,
    sizes: Mapping[str, int] | None = None,
) -> "SearchStrategy[tuple[Mesh, Layout]]":
    """Pairs of a mesh and a layout for it; arguments as for `meshes` and `compositions`.

    >>> from hypothesis import find
    >>> mesh, layout = find(parallelisms(), lambda pair: "mlp" in pair[1].compute)
    >>> mesh, layout.compute["mlp"]
    (Mesh(dp=2), ('dp',))
    """
    st = _strategies()
    of_mesh = meshes(max_size, axes).filter(lambda mesh: compositions(mesh, kinds, sizes))
    return of_mesh.flatmap(lambda mesh: st.tuples(st.just(mesh), layouts(mesh, kinds, sizes)))


def specs(shape: Sequence[int], mesh: Mesh, partial: bool = True) -> "SearchStrategy[P]":
    """Specs of a tensor: each axis of `mesh` splits one of its dims, or none, or leaves a pending sum.

    >>> from hypothesis import find
    >>> find(specs((4, 6), Mesh(dp=2, tp=2)), lambda spec: spec.partial and spec.dims[1])
    P(None, 'dp', partial='tp')
    """
    st = _strategies()
    places: list[Any] = [None, *range(len(shape)), *(["partial"] if partial else [])]

    def spec(choice: tuple[Any, ...]) -> P:
        at = dict(zip(mesh.axes, choice, strict=True))
        dims = [tuple(a for a in mesh.axes if at[a] == d) or None for d in range(len(shape))]
        return P(*dims, partial=tuple(a for a in mesh.axes if at[a] == "partial") or None)

    return st.tuples(*[st.sampled_from(places)] * len(mesh.axes)).map(spec)


def batches(example: Any, ignored: Mapping[str, int] | None = None) -> "SearchStrategy[Any]":
    """Batches like an example: floats are normal, integers lie between the example's smallest and largest.

    Args:
        example: a pytree of tensors.
        ignored: for leaves, by their key in the example, the label that does not count. It is set unevenly: in some
            rows nowhere, in some at places, in some all along, but never in all rows.

    >>> from hypothesis import find
    >>> like = {"x": torch.zeros(2, 3), "label": torch.tensor([0, 9])}
    >>> find(batches(like, {"label": -100}), lambda batch: -100 in batch["label"])["label"].min()
    tensor(-100)
    """
    st = _strategies()
    wanted = {f"[{key!r}]": value for key, value in (ignored or {}).items()}
    leaves, treedef = tree.flatten(example)
    paths = tree.paths_of(treedef)

    def one(drawn: tuple[int, list[str], int]) -> Any:
        seed, rows, counted = drawn
        g = torch.Generator().manual_seed(seed)
        out = []
        for path, like in zip(paths, leaves, strict=True):
            x = _random(like, g)
            for row in range(len(x) if path in wanted else 0):
                kind = "none" if row == counted % len(x) else rows[row % len(rows)]
                if kind == "all":
                    x[row] = wanted[path]
                elif kind == "some":
                    x[row] = torch.where(torch.rand(x[row].shape, generator=g) < 0.5, wanted[path], x[row])
            out.append(x)
        return tree.unflatten(treedef, out)

    kinds = st.lists(st.sampled_from(["none", "some", "all"]), min_size=1, max_size=8)
    return st.tuples(st.integers(0, 2**31), kinds, st.integers(0, 7)).map(one)


def _random(like: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, generator=g, dtype=torch.float64).to(like.dtype)
    low, high = (int(like.min()), int(like.max())) if like.numel() else (0, 0)
    return torch.randint(low, high + 1, like.shape, generator=g).to(like.dtype)


@dataclasses.dataclass(frozen=True)
class _Compared:
    """One value beside the true one: how far off it is, and which multiple of the true one is nearest to it."""

    name: str
    error: float
    ratio: float


def _compared(name: str, got: Any, want: Any, scale: float = 0.0, start: Any = 0) -> _Compared:
    got, want = (torch.as_tensor(x, dtype=torch.float64) - start for x in (got, want))
    norm = max(want.norm().item(), scale)
    error = (got - want).norm().item()
    square = (want * want).sum().item()
    ratio = (got * want).sum().item() / square if square else 1.0
    return _Compared(name, error / norm if norm else error, ratio)


def _rows(name: str, got: Any, want: Any, scale: float = 0.0, start: Any = None) -> Iterator[_Compared]:
    before = tree.leaves(start) if start is not None else [0] * len(tree.leaves(want))
    for path, a, b, s in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), before, strict=True):
        yield _compared(name + path, a, b, scale, s)


def assert_equivalent(
    fn: Callable[..., Any],
    *,
    template: Any,
    batch: Any,
    mesh: Mesh,
    layout: Layout,
    optimizer: Transform | None = None,
    steps: int = 3,
    accumulate: int = 1,
    batch_dims: Any = None,
    remat: str = "none",
    reshard: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = torch.float64,
    rtol: float = 1e-9,
    seed: int = 0,
) -> float:
    """Asserts that a function computes on a mesh, split by a layout, what it computes on one device.

    All ranks run in this process, by the very program that each would run. For a loss function these are compared:
    loss, count, auxiliary values and the gradient of every parameter; with an optimizer, after `steps` training steps,
    also the gradients' norm, the parameters' changes and the optimizer's state. Each is measured against its own norm
    (or that which rounding alone gives, if it is smaller), so that no wrong leaf hides behind a large one. Of any
    other function the outputs are compared.

    Args:
        fn: `(params, batch) -> (sum, count)` or `(sum, count, aux)`, or any pure function of both.
        template: pytree of `Param`. Parameters take their initial values plus noise: zeros and ones hide lost terms.
        batch: a whole batch.
        mesh: the ranks.
        layout: how it is split.
        optimizer: such as `adamw(...)`; None compares loss and gradients alone.
        steps: training steps to take, all on `batch`.
        accumulate: microbatches a step.
        batch_dims: dim names of the batch's leaves, as for `compile`.
        remat, reshard, bucket_bytes: as for `compile_step`.
        dtype: in which parameters and floating leaves of the batch are taken; the layout's precision is then left out,
            since it changes what is computed. None keeps all of them as they are, at a larger `rtol`.
        rtol: the largest relative error that passes.
        seed: of the initial values.

    Returns:
        The largest relative error.

    Raises:
        AssertionError: what differs, the worst first.
        FeatherError: what can't be compiled, as from `compile`.

    >>> template = {"w": Param("embed mlp", (4, 6))}
    >>> def loss(params, batch):
    ...     return ((batch @ params["w"]) ** 2).sum(), torch.tensor(batch.numel())
    >>> error = assert_equivalent(loss, template=template, batch=torch.randn(4, 4), batch_dims="batch embed",
    ...                           mesh=Mesh(dp=2), layout=Layout(compute={"batch": "dp"}), optimizer=sgd(lr=0.1))
    >>> error < 1e-12
    True
    """
    if dtype is not None:
        template = tree.map(lambda p: _as_param(p, dtype), template)
        batch = tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
        layout = _unrounded(layout)
    settings = {"template": template, "mesh": mesh, "layout": layout, "batch": batch, "batch_dims": batch_dims}
    params = _moved(init(template, seed), seed)
    law = _Law(fn, mesh, layout, rtol)

    whole = fn(params, batch)
    if not _is_loss(whole):
        law.hold(_rows("output", compile(fn, **settings).simulate(params, batch), whole))
        return law.worst

    want, grads = value_and_grad(fn)(params, batch)
    if optimizer is None and accumulate == 1:
        got, got_grads = compile(value_and_grad(fn), **settings, reshard=reshard).simulate(params, batch)
        step = None
    else:
        how = {"accumulate": accumulate, "remat": remat, "reshard": reshard, "bucket_bytes": bucket_bytes}
        step = compile_step(fn, optimizer or sgd(lr=1.0), **settings, **how)  # type: ignore[arg-type]
        got, got_grads = _gradients(step, params, batch)
    # What is smaller than the rounding of the largest leaf says nothing.
    least = 10 * torch.finfo(dtype or torch.float32).eps / rtol * global_norm(grads).item()
    law.hold([*_rows("", got, want), *_rows("grads", got_grads, grads, least)])

    if step is not None and optimizer is not None:
        law.hold(_rows("initial optimizer state", step.init(seed).opt, optimizer.init(init(template, seed))))
        state, first = State(params, optimizer.init(params), 0, True), params
        opt = state.opt
        for k in range(steps):
            state, metrics = step.simulate(state, batch)
            want, grads = value_and_grad(fn)(params, batch)
            wanted = {"loss": want["loss"], "count": want["count"], "grad_norm": global_norm(grads)}
            law.hold(_rows(f"step {k + 1}", {name: metrics[name] for name in wanted}, wanted))
            updates, opt = optimizer.update(grads, opt, params)
            params = apply_updates(params, updates)
        law.hold([*_rows("params", state.params, params, start=first), *_rows("optimizer state", state.opt, opt)])
    return law.worst


def _as_param(p: Param, dtype: torch.dtype) -> Param:
    return dataclasses.replace(p, dtype=dtype) if p.dtype.is_floating_point else p


def _unrounded(layout: Layout) -> Layout:
    overrides = {pattern: _unrounded(inner) for pattern, inner in layout.overrides.items()}
    return dataclasses.replace(layout, precision=Precision(), overrides=overrides)


def _moved(params: Any, seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)

    def move(x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=g, dtype=x.dtype) if x.is_floating_point() else x

    return tree.map(move, params)


def _is_loss(out: Any) -> bool:
    return (
        isinstance(out, tuple)
        and len(out) in (2, 3)
        and all(isinstance(x, torch.Tensor) and x.ndim == 0 for x in out[:2])
        and out[0].is_floating_point()
    )


def _gradients(step: Step, params: Any, batch: Any) -> tuple[dict[str, Any], Any]:
    """Loss, count, auxiliary values and whole gradients of a step, before its optimizer takes them."""
    sections, run, n = step.program.sections, step.simulator().run, len(step.params.types)
    leaves = step.scatter(tree.leaves(params), step.params.at_rest())
    first, *following = step.sim_microbatches(batch, "assert_equivalent(...)")
    so_far = run(sections["first"], [*leaves, *first])
    for data in following:
        so_far = run(sections["following"], [*leaves, *data, *so_far])
    finish = sections["finish"]
    values = step.gather(run(finish, so_far), finish.out_types())
    total, count = values[n : n + 2]
    out = {"loss": total / count, "count": count}
    if step._aux_tree is not None:
        out["aux"] = tree.unflatten(step._aux_tree, values[n + 2 :])
    grads = [g / count.to(g.dtype) for g in values[:n]]
    return out, tree.unflatten(step.params.treedef, grads)


_SHOWN = 8


@dataclasses.dataclass
class _Law:
    """What `assert_equivalent` was given, and the worst it has seen."""

    fn: Callable[..., Any]
    mesh: Mesh
    layout: Layout
    rtol: float
    worst: float = 0.0

    def hold(self, compared: Iterator[_Compared] | Sequence[_Compared]) -> None:
        """Raises AssertionError if any of these is off; NaN is."""
        rows = sorted(compared, key=lambda c: -c.error if c.error == c.error else -math.inf)
        wrong = [c for c in rows if not c.error <= self.rtol]
        self.worst = max([self.worst, *(c.error for c in rows)])
        if not wrong:
            return
        shown = [f"{c.name}: relative error {c.error:.1e}, {c.ratio:.6g} of the true one" for c in wrong[:_SHOWN]]
        if len(wrong) > _SHOWN:
            shown.append(f"and {len(wrong) - _SHOWN} more")
        name = getattr(self.fn, "__name__", "fn")
        raise AssertionError(
            message(
                call=f"assert_equivalent({name}, mesh={self.mesh!r}, layout={self.layout!r})",
                got="\n".join(shown),
                number=f"{len(wrong)} of {len(rows)} values are off by more than rtol={self.rtol:g}; "
                f"{wrong[0].name} by {wrong[0].error:.1e}",
                rule="a layout says how a computation is split, never what: one device is the specification",
                fix=self._hint(wrong[0]),
            )
        )

    def _hint(self, c: _Compared) -> str:
        for k in range(1, len(self.mesh.axes) + 1):
            for axes in itertools.combinations(self.mesh.axes, k):
                n, names = self.mesh.count(axes), ", ".join(map(repr, axes))
                if n > 1 and math.isclose(c.ratio, n, rel_tol=1e-6):
                    return f"{c.name} is {n} times too large: look for a sum over {names} that is taken once too often"
                if n > 1 and math.isclose(c.ratio * n, 1, rel_tol=1e-6):
                    return (
                        f"{c.name} is {n} times too small: look for a sum over {names} left out, or a mean in its place"
                    )
        return (
            "where a term is lost, look at rules and manual regions of your own; print(ff.compile(...).program.text()) "
            f"shows every collective. Fewer axes than {self.mesh!r} tell which one it is"
        )
