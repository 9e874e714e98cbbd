"""The law of layouts: what a function computes on a mesh is what it computes on one device, leaf by leaf."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from .. import tree
from ..compiled import BUCKET_BYTES, Common
from ..compiler import compile, value_and_grad
from ..draws import INIT, UPDATE, seeded
from ..errors import message
from ..layout import Layout, Precision
from ..mesh import Mesh
from ..optim import Transform, apply_updates, global_norm, sgd
from ..param import Param, init
from ..spec import Type, slices
from ..state import State
from ..step import Step, compile_step


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


def _rows(name: str, got: Any, want: Any, scales: Sequence[float] = (), start: Any = None) -> Iterator[_Compared]:
    n = len(tree.leaves(want))
    before = tree.leaves(start) if start is not None else [0] * n
    leaves = zip(tree.paths(want), tree.leaves(got), tree.leaves(want), scales or [0.0] * n, before, strict=True)
    for path, a, b, scale, s in leaves:
        yield _compared(name + path, a, b, scale, s)


def _with_noise(grads: Any, least: float, noise: float, seed: int) -> Any:
    """The gradients of another rounding: leaves whose norm is below `least` move by `noise`, in any direction."""
    g = torch.Generator().manual_seed(seed)

    def move(x: torch.Tensor) -> torch.Tensor:
        if not x.numel() or x.norm() >= least:
            return x
        way = torch.randn(x.shape, generator=g, dtype=torch.float64)
        return x + (way * (noise / way.norm())).to(x.dtype)

    return tree.map(move, grads)


def _distances(near: Any, want: Any) -> list[float]:
    pairs = zip(tree.leaves(near), tree.leaves(want), strict=True)
    norms = [(a.to(torch.float64) - b.to(torch.float64)).norm().item() for a, b in pairs]
    # Beside an infinite one any error would pass.
    return [norm if math.isfinite(norm) else 0.0 for norm in norms]


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
    remat: str | int = "none",
    reshard: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    prefetch_bytes: int | None = None,
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
        remat, reshard, bucket_bytes, prefetch_bytes: as for `compile_step`.
        dtype: in which parameters and floating leaves of the batch are taken; the layout's precision is then left out,
            since it changes what is computed. None keeps all of them as they are, at a larger `rtol`.
        rtol: the largest relative error that passes.
        seed: of the initial values, and of random numbers that are drawn.

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

    with seeded(seed):
        whole = fn(params, batch)
    if not _is_loss(whole):
        law.hold(_rows("output", _watched(compile(fn, **settings, seed=seed), law).simulate(params, batch), whole))
        return law.worst

    frozen = optimizer.frozen(template) if optimizer is not None and optimizer.frozen is not None else frozenset()

    def true_gradients(params: Any, step: int = 0) -> tuple[dict[str, Any], Any]:
        with seeded(seed, step):
            want, grads = value_and_grad(fn)(params, batch)
        leaves, treedef = tree.flatten(grads)
        return want, tree.unflatten(treedef, [g.new_zeros(()) if i in frozen else g for i, g in enumerate(leaves)])

    want, grads = true_gradients(params)
    if optimizer is None and accumulate == 1:
        both = _watched(compile(value_and_grad(fn), **settings, reshard=reshard, seed=seed), law)
        got, got_grads = both.simulate(params, batch)
        step = None
    else:
        how: dict[str, Any] = {"accumulate": accumulate, "remat": remat, "reshard": reshard, "seed": seed}
        how |= {"bucket_bytes": bucket_bytes, "prefetch_bytes": prefetch_bytes}
        step = _watched(compile_step(fn, optimizer or sgd(lr=1.0), **settings, **how), law)
        got, got_grads = _gradients(step, params, batch)
    # What is smaller than the rounding of the largest leaf says nothing.
    eps = 10 * torch.finfo(dtype or torch.float32).eps
    least = [eps / rtol * global_norm(grads).item()] * len(tree.leaves(grads))
    law.hold([*_rows("", got, want), *_rows("grads", got_grads, grads, least)])

    if step is not None and optimizer is not None:
        untouched = init(template, seed)
        with seeded(seed, part=INIT):
            started = optimizer.init(untouched)
        law.hold(_rows("initial optimizer state", step.init(seed).opt, started))
        with seeded(seed, part=INIT):
            state, first = State(params, optimizer.init(params), 0, True), params
        opt = state.opt
        # Adam's second moment squares such a gradient, and its direction divides by it: how far that reaches is seen.
        near_params, near_opt = params, opt
        for k in range(steps):
            state, metrics = step.simulate(state, batch)
            want, grads = true_gradients(params, k)
            wanted = {"loss": want["loss"], "count": want["count"], "grad_norm": global_norm(grads)}
            law.hold(_rows(f"step {k + 1}", {name: metrics[name] for name in wanted}, wanted))
            noise = eps * wanted["grad_norm"].item()
            moved = _with_noise(grads, noise / rtol, noise, k)
            with seeded(seed, k, UPDATE):
                near_updates, near_opt = optimizer.update(moved, near_opt, near_params)
                near_params = apply_updates(near_params, near_updates)
            with seeded(seed, k, UPDATE):
                updates, opt = optimizer.update(grads, opt, params)
                params = apply_updates(params, updates)
        of_params, of_opt = ([x / rtol for x in _distances(*p)] for p in ((near_params, params), (near_opt, opt)))
        law.hold(
            [
                *_rows("params", state.params, params, of_params, first),
                *_rows("optimizer state", state.opt, opt, of_opt),
            ]
        )
    return law.worst


_Compiled = TypeVar("_Compiled", bound=Common)


def _watched(program: _Compiled, law: "_Law") -> _Compiled:
    """The same, but the law is told of whatever is not alike, bit for bit, on all ranks that should hold the same."""
    gather, mesh = program.gather, program.mesh

    def watched(values: Sequence[list[torch.Tensor]], types: Sequence[Type]) -> list[torch.Tensor]:
        for ranks, t in zip(values, types, strict=True):
            same = tuple(a for a in mesh.axes if a not in t.sharded | t.partial)
            for first, *others in mesh.groups(same) if same else ():
                where = tuple(slice(0, s.stop - s.start) for s in slices(t, mesh, first))
                apart = [r for r in others if not torch.equal(ranks[r][where], ranks[first][where])]
                if apart and not ranks[first][where].isnan().any():
                    law.apart.append(f"a value {t} that differs between rank {first} and ranks {apart}")
        return gather(values, types)

    program.gather = watched  # type: ignore[method-assign]
    return program


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
    n = len(step.params.types)
    leaves = step.scatter(tree.leaves(params), step.params.at_rest())
    microbatches = step.sim_microbatches(batch, "assert_equivalent(...)")
    reduced = step._advance.reduced(leaves, microbatches, step.simulator())
    values = step.gather(reduced, step.program.sections["finish"].out_types()[: len(reduced)])
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
    apart: list[str] = dataclasses.field(default_factory=list)

    def hold(self, compared: Iterator[_Compared] | Sequence[_Compared]) -> None:
        """Raises AssertionError if any of these is off; NaN is."""
        rows = sorted(compared, key=lambda c: -c.error if c.error == c.error else -math.inf)
        wrong = [c for c in rows if not c.error <= self.rtol]
        self.worst = max([self.worst, *(c.error for c in rows)])
        if wrong:
            shown = [f"{c.name}: relative error {c.error:.1e}, {c.ratio:.6g} of the true one" for c in wrong]
            self._fail(
                shown,
                number=f"{len(wrong)} of {len(rows)} values are off by more than rtol={self.rtol:g}; "
                f"{wrong[0].name} by {wrong[0].error:.1e}",
                rule="a layout says how a computation is split, never what: one device is the specification",
                fix=self._hint(wrong[0]),
            )
        if self.apart:
            self._fail(
                self.apart,
                number=f"{len(self.apart)} values are not the same, bit for bit, on ranks that hold one value",
                rule="a value is the same on all ranks of the axes that do not split it, or they drift apart",
                fix="look for a random number, or a sum left out, where the value is made",
            )

    def _fail(self, got: list[str], **parts: str) -> NoReturn:
        name = getattr(self.fn, "__name__", "fn")
        more = [f"and {len(got) - _SHOWN} more"] if len(got) > _SHOWN else []
        call = f"assert_equivalent({name}, mesh={self.mesh!r}, layout={self.layout!r})"
        raise AssertionError(message(call=call, got="\n".join([*got[:_SHOWN], *more]), **parts))

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
