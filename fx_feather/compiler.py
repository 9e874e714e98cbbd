"""Compiling: from a function, a template, a mesh and a layout to something that runs, simulates and explains itself."""

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from . import garbage, tree
from .agreement import Leaf
from .compiled import BUCKET_BYTES, Common
from .draws import LOSS
from .errors import FeatherError, OptionError, fail
from .layout import Layout
from .mesh import Mesh
from .passes.draws import first_draw
from .passes.interleave import interleave
from .passes.overlap import overlap
from .passes.stitch import Funcs, Stitcher
from .passes.training import gradient_sections, key_types, loss_function, resolved, wide_count
from .program import Program, Section
from .rules import Handwritten
from .settings import check, count, known_options
from .unit import GlobalProgram


@dataclasses.dataclass(frozen=True)
class ValueAndGrad:
    """A loss function together with its gradient; see `value_and_grad`."""

    loss_fn: Callable[..., Any]

    def __call__(self, params: Any, batch: Any) -> tuple[dict[str, Any], Any]:
        """Loss, count and gradients on one device."""
        leaves, treedef = tree.flatten(params)

        def mean(*xs: torch.Tensor) -> tuple[torch.Tensor, Any]:
            with Handwritten():
                total, count, *aux = self.loss_fn(tree.unflatten(treedef, xs), batch)
            count = wide_count(count)
            return total / count.to(total.dtype), (count, *aux)

        loss, pull, (count, *aux) = torch.func.vjp(mean, *leaves, has_aux=True)  # type: ignore[misc]
        out = {"loss": loss, "count": count}
        if aux:
            (out["aux"],) = aux
        return out, tree.unflatten(treedef, pull(torch.ones_like(loss)))


def value_and_grad(loss_fn: Callable[..., Any]) -> ValueAndGrad:
    """Turns a loss function into one of loss and gradients, to be called on one device or given to `compile`.

    Args:
        loss_fn: `(params, batch) -> (sum, count)` or `(sum, count, aux)`.

    Returns:
        A function `(params, batch) -> ({"loss", "count"[, "aux"]}, grads)`: the loss is sum / count, and the gradients
        are of that quotient.

    >>> f = value_and_grad(lambda p, b: ((p * b).sum(), torch.tensor(b.numel())))
    >>> f(torch.tensor(2.0), torch.tensor([1.0, 3.0]))
    ({'loss': tensor(4.), 'count': tensor(2)}, tensor(2.))
    """
    return ValueAndGrad(loss_fn)


class Compiled(Common):
    """A pure function `(params, batch) -> pytree`, compiled for a mesh and a layout; made by `compile`."""

    def __init__(
        self,
        fn: Any,
        template: Any,
        mesh: Mesh,
        layout: Layout,
        batch: Any,
        batch_dims: Any,
        device: str | None,
        reshard: bool,
        backend: str,
        seed: int | None,
    ):
        super().__init__(template, mesh, layout, batch, batch_dims, device, 1, backend)
        s = Stitcher(Funcs(mesh, self.layout, self.device))
        self._out_tree: Any
        #: Where the first results stand in the order of the tree that they become.
        self._order: list[int] = []
        self._traced: GlobalProgram
        if isinstance(fn, ValueAndGrad):
            sections = self._differentiated(s, fn.loss_fn, reshard)
        else:
            sections = self._plain(s, fn)
        for section in sections:
            overlap(section)
            section.donate()
        if seed is None and (at := first_draw(self._traced)):
            _refuse_draw(at)
        self.drawn = {LOSS: self._traced.drawn}
        self.program = Program(mesh, {x.name: x for x in sections}, seed if self._traced.drawn else None)
        for func in self.program.funcs():
            interleave(func.graph)
        self.out_types = tree.unflatten(self._out_tree, self._out_types)
        self._compared = mesh.size == 1

    def _plain(self, s: Stitcher, fn: Callable[..., Any]) -> list[Section]:
        self._traced = program = self.trace(fn, getattr(fn, "__name__", "fn"))
        inputs = [s.new(t) for t in (*self.params.at_rest(), *self.batch.types, *key_types(program))]
        f = s.forward(program, inputs, dict(enumerate(self.params.in_use())))
        s.run_forward(f, {}, set())
        types = [resolved(s.types[f.values[o]]) for o in program.outputs]
        outs = s.convert([f.values[o] for o in program.outputs], types, "results")
        self._out_tree, self._out_types = program.out_tree, types
        return [s.section("main", inputs, outs)]

    def _differentiated(self, s: Stitcher, loss_fn: Callable[..., Any], reshard: bool) -> list[Section]:
        wrapped = loss_function(loss_fn)
        self._traced = program = self.trace(wrapped, "loss")
        g = gradient_sections(s, program, self.params, self.batch.types, reshard, BUCKET_BYTES)
        n = len(self.params.types)
        reduced, results = g.finish.out_types()[:n], g.finish.out_types()[n:]
        ins = s.like(g.finish.outputs)
        loss = s.small(lambda a, b: [a / b], ins[n : n + 2], results[0], "mean")
        grads = [
            s.small(lambda x, c: [x / c.to(x.dtype)], [v, ins[n + 1]], t, "mean")
            for v, t in zip(ins[:n], reduced, strict=True)
        ]
        at_rest = [t.with_(dtype=r.dtype) for t, r in zip(self.params.at_rest(), reduced, strict=True)]
        grads = s.convert(grads, at_rest, "store", BUCKET_BYTES)
        last = s.section("mean", ins, [loss, ins[n + 1], *ins[n + 2 :], *grads])
        out = {"loss": 0, "count": 0}
        if wrapped.aux_tree is not None:  # type: ignore[attr-defined]
            out["aux"] = tree.unflatten(wrapped.aux_tree, [0] * len(results[2:]))  # type: ignore[attr-defined]
        self._order = _value_order(out)
        self._out_tree = tree.structure((out, tree.unflatten(self.params.treedef, [0] * n)))
        self._out_types = [last.out_types()[i] for i in self._order] + last.out_types()[len(self._order) :]
        return [g.first, g.finish, last]

    def _chain(self, run: Callable[[Section, list[Any]], list[Any]], inputs: list[Any]) -> list[Any]:
        for section in self.program.sections.values():
            inputs = run(section, inputs)
        return [inputs[i] for i in self._order] + inputs[len(self._order) :]

    def __call__(self, params: Any, batch: Any, step: int = 0) -> Any:
        """Runs on this rank.

        Args:
            params: local parts, as `init_params` makes them.
            batch: this rank's part of the batch, as `shard` makes it.
            step: random numbers differ from step to step.

        Returns:
            The local parts of the results, split as `out_types` says; pending sums are resolved.

        Raises:
            RankError: in the first call, ranks hold other parameters or batches than they should in common.
        """
        call, run = "f(params, batch)", self.runtime()
        leaves = self.local_params(params, call)
        data = self.local_microbatches(batch, call, step)[0]
        if not self._compared:
            held = zip(self.params.paths, leaves, self.params.at_rest(), strict=True)
            self.agree(call, {"step": step}, [Leaf(f"params{path}", x, t) for path, x, t in held], batch)
        self._compared = True
        outs = self._chain(run.run, [*leaves, *data])
        return tree.unflatten(self._out_tree, outs)

    def whole(self, results: Any) -> Any:
        """Whole results, the same on every rank, from the local parts that a call returned.

        It is for looking at results and comparing them: every rank must call it, and each then holds all values.
        """
        tree.check_same(self._out_tree, results, call="whole(results)", name="results")
        if not self.local:
            return results
        return tree.unflatten(self._out_tree, self.runtime().gather(tree.leaves(results), self._out_types))

    def simulate(self, params: Any, batch: Any, step: int = 0) -> Any:
        """Runs all ranks in this process: whole values in, whole results out."""
        values = self.scatter(self.whole_params(params, "simulate(params, batch)"), self.params.at_rest())
        data = self.sim_microbatches(batch, "simulate(params, batch)", step)[0]
        outs = self._chain(self.simulator().run, [*values, *data])
        return tree.unflatten(self._out_tree, self.gather(outs, self._out_types))

    def run_whole(self, params: Any, batch: Any, step: int = 0) -> Any:
        """Runs wherever this process is: whole values in, and whole results out, the same on every rank.

        Under torchrun each rank takes its own part of what comes in, and the results are gathered; in one process all
        ranks are simulated. It is for looking at results and comparing them: every rank must call it, and each then
        holds all values. What is called often keeps its values split: `f(params, batch)` with local parts.
        """
        if not self.local:
            return self.simulate(params, batch, step)
        return self.whole(self(self.shard_params(params), self.shard(batch), step))


def _refuse_draw(where: str) -> NoReturn:
    fail(
        FeatherError,
        call=f"compile(fn, ...), whose fn draws random numbers at {where}",
        got="seed=None",
        number="a draw has no seed",
        rule="random numbers are functions of a seed and a step, and an evaluation has none of its own",
        fix="dropout with training=False, for an evaluation; or compile(fn, ..., seed=0), and f(params, batch, step=k) "
        "for other numbers in each call",
    )


def _value_order(out: dict[str, Any]) -> list[int]:
    """Where the leaves of the result dict stand in [loss, count, *aux]."""
    n_aux = len(tree.leaves(out.get("aux")))
    numbered = {"loss": 0, "count": 1}
    if "aux" in out:
        numbered["aux"] = tree.unflatten(tree.structure(out["aux"]), range(2, 2 + n_aux))
    return tree.leaves(numbered)


@known_options
@garbage.kept()
def compile(
    fn: Callable[..., Any],
    *,
    template: Any,
    mesh: Mesh,
    layout: Layout,
    batch: Any,
    batch_dims: Any = None,
    device: str | None = None,
    reshard: bool = True,
    backend: str = "eager",
    seed: int | None = None,
) -> Compiled:
    """Compiles a pure function of parameters and a batch for a mesh and a layout.

    Args:
        fn: `(params, batch) -> pytree of tensors`, or `value_and_grad(loss_fn)`.
        template: pytree of `Param`.
        mesh: the ranks.
        layout: how values are split.
        batch: an example of a whole batch; only shapes and dtypes matter.
        batch_dims: dim names of the batch's leaves, one string for all or a pytree of strings; by default a leaf's
            dims are "batch seq" and further ones without a name.
        device: `cpu` or `cuda`; CUDA by default where there is any.
        reshard: free gathered parameters after the forward and gather them again for the backward.
        backend: `eager` runs operator by operator; `inductor` fuses them, each distinct block compiled once, with
            results that are close but not the same bits.
        seed: what random numbers are drawn by, with the number of the step that a call is given; see `compile_step`.
            Without one, a function that draws is refused, but for draws by keys of its own (`ff.random`).

    Returns:
        A `Compiled`: call it with local parts under torchrun, `simulate` it with whole values in one process, or
        `run_whole` it in both.

    Raises:
        FeatherError: whatever of the template, layout, batch and function do not fit together.

    >>> import fx_feather as ff
    >>> template = {"w": ff.Param("embed mlp", (4, 8))}
    >>> f = ff.compile(lambda p, b: b @ p["w"], template=template, mesh=ff.Mesh(tp=2),
    ...                layout=ff.Layout(compute={"mlp": "tp"}), batch=torch.ones(2, 4), batch_dims="batch embed")
    >>> f.simulate(ff.init(template), torch.ones(2, 4)).shape
    torch.Size([2, 8])
    >>> f.out_types
    f32[2, 8@tp]
    """
    seeds = count(-(1 << 63), none=True)
    check(OptionError, "compile", {"seed": seed}, [("seed", seeds, "a seed is any integer, or None", "seed=0")])
    return Compiled(fn, template, mesh, layout, batch, batch_dims, device, reshard, backend, seed)
