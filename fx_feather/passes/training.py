"""The sections of a training step: gradients of microbatches, their reduction, the check, and the update."""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import tree
from ..draws import INIT, UPDATE
from ..errors import ShapeError, fail
from ..layout import ParamTypes
from ..optim import Transform, leaf
from ..optim.norm import scaled_norm
from ..program import Section
from ..spec import Type
from ..tiles import POINTWISE, is_pointwise
from ..trace import block, trace
from ..unit import GlobalProgram, Unit, avals
from .numbers import Numbers, checked
from .order import by_output
from .parts import at_its_use, in_parts
from .reach import check_reached, gradient_type, needs_gradient, reached_by_cotangents
from .results import finished
from .results import resolved as resolved
from .stitch import Stitcher


@dataclasses.dataclass(repr=False)
class Parameters:
    """The parameters of a program, leaf by leaf: their types at rest and in use."""

    treedef: Any
    types: list[ParamTypes]
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    #: Numbers of those that the optimizer never moves: a number stands in the place of their gradients.
    frozen: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        elements = sum(math.prod(t.compute.shape) for t in self.types)
        return f"{len(self.types)} parameters of {elements:,} elements"

    @ft.cached_property
    def paths(self) -> list[str]:
        """The key path of each leaf; only messages need them."""
        return tree.paths_of(self.treedef)

    def in_use(self) -> list[Type]:
        """Types of the values that the model computes with."""
        return [t.compute.with_(dtype=self._used(t.compute.dtype)) for t in self.types]

    def at_rest(self) -> list[Type]:
        return [t.store for t in self.types]

    def reduced(self, i: int) -> torch.dtype:
        """The dtype in which a gradient is reduced, accumulated and given to the optimizer."""
        own = self.types[i].store.dtype
        return self.reduce_dtype if self.reduce_dtype is not None and own.is_floating_point else own

    def gradients(self) -> list[Type]:
        """Types of the reduced gradients."""
        return [
            Type(self.reduced(i), (), ()) if i in self.frozen else t.opt.with_(dtype=self.reduced(i))
            for i, t in enumerate(self.types)
        ]

    def _used(self, own: torch.dtype) -> torch.dtype:
        return self.compute_dtype if self.compute_dtype is not None and own.is_floating_point else own


@dataclasses.dataclass
class Gradients:
    """The sections that make gradients.

    `first` takes parameters, a microbatch and keys to draw by, and gives unreduced gradients and results; `following`
    takes also what there is so far, and adds to it; `finish` reduces both. Where `compared` has axes, `finish` takes
    two numbers more from each rank, and gives their sums over these as one vector: they travel with other sums.
    """

    first: Section
    following: Section | None
    finish: Section
    compared: tuple[str, ...] = ()


#: Parts in which the gradients of a step are reduced at least, if none is of fewer bytes than the second number.
_PARTS, _LEAST = 8, 1 << 20


def gradient_sections(
    s: Stitcher,
    program: GlobalProgram,
    params: Parameters,
    batch: Sequence[Type],
    reshard: bool,
    bucket: int,
    accumulate: int = 1,
    tokens: bool = False,
) -> Gradients:
    """Builds the sections that make gradients.

    Args:
        s: where to build.
        program: of `(params, batch) -> [sum, count, *aux]`.
        params: the parameters.
        batch: types of the leaves of a microbatch.
        reshard: whether gathered parameters are freed after the forward.
        bucket: bytes that travel together, at most, when gradients are reduced at the end of the step.
        accumulate: microbatches; with one there is no `following`.
        tokens: whether ranks compare two numbers.
    """
    n = len(params.types)
    final = params.gradients()
    # What is complete is reduced while the rest of the backward runs, in a few parts that are worth a message each.
    total = sum(math.prod(t.local_shape(s.mesh)) * t.dtype.itemsize for t in params.in_use())
    worth = min(bucket, max(total // _PARTS, _LEAST))
    wanted: list[Type] = []
    results: list[Type] = []

    def microbatch(name: str, before: Sequence[int] | None) -> Section:
        at_rest = [s.new(t) for t in params.at_rest()]
        data = [s.new(t) for t in (*batch, *key_types(program))]
        f = s.forward(program, [*at_rest, *data], dict(enumerate(params.in_use())))
        if not wanted:
            varying: dict[int, frozenset[str]] = {g: frozenset() for g in program.inputs[:n]}
            for call in f.calls:
                for row in call.rows:
                    for g, t in zip(row.args, call.plan.in_types, strict=True):
                        if g in varying:
                            varying[g] |= t.replicated
            for i, (g, use) in enumerate(zip(program.inputs, params.in_use(), strict=False)):
                frozen = i in params.frozen
                wanted.append(
                    final[i] if frozen else gradient_type(use, params.types[i], params.reduced(i), varying[g])
                )
            results.extend(f.out_types())
        so_far = s.like(before or ())
        sums = dict(zip(program.inputs[:n], so_far, strict=False))
        needs = needs_gradient(program, {g for i, g in enumerate(program.inputs[:n]) if i not in params.frozen})
        check_reached(program, needs)
        loss = program.outputs[0]
        s.run_forward(f, needs, reached_by_cotangents(program, needs, {loss}))
        position = {g: i for i, g in enumerate(program.inputs[:n])}

        missing = f.uses()
        complete: list[int] = []
        #: Sums over the uses so far of what has more uses: what communicates is sent once.
        held: dict[int, int] = {}
        waiting = 0

        def collect(unit: str, cotangents: list[tuple[int, int]]) -> None:
            nonlocal waiting
            ready: list[tuple[int, int]] = []
            for g, ct in cotangents:
                missing[g] -= 1
                v, target = ct, wanted[position[g]]
                if missing[g] or g in held:
                    # In the dtype of the reduction, whose precision the sum of the uses deserves too.
                    v = s.convert([v], [s.types[v].with_(dtype=target.dtype)], f"{unit}.reduce")[0]
                if g in held and s.types[held[g]] == s.types[v]:
                    v = s.add(held.pop(g), v)
                elif g in held:
                    ready.append((g, held.pop(g)))
                if missing[g] and not s.funcs.is_free(s.types[v], target):
                    held[g] = v
                else:
                    ready.append((g, v))
            targets = [wanted[position[g]] for g, _ in ready]
            converted = s.convert([v for _, v in ready], targets, f"{unit}.reduce")
            for (g, _), v in zip(ready, converted, strict=True):
                sums[g] = s.add(sums[g], v) if g in sums else v
            for g in dict.fromkeys(g for g, _ in ready):
                if not missing[g] and accumulate == 1 and not s.funcs.is_free(wanted[position[g]], final[position[g]]):
                    complete.append(g)
                    waiting += s.bytes(sums[g])
            if waiting >= worth:
                reduced = s.convert(
                    [sums[g] for g in complete], [final[position[g]] for g in complete], "reduce", bucket
                )
                sums.update(zip(complete, reduced, strict=True))
                complete.clear()
                waiting = 0

        seed_type = results[0].cotangent()
        same = seed_type.with_(partial=frozenset())
        seed = s.small(lambda: [torch.ones((), dtype=same.dtype, device=s.funcs.device)], [], same, "seed", same)
        if seed_type.partial:  # of a loss that is R, whose cotangents are added up: one rank has it
            (seed,) = s.convert([seed], [seed_type], "seed")
        s.run_backward(f, {loss: seed}, collect, reshard)
        grads = [sums[g] if g in sums else _zeros(s, wanted[i]) for i, g in enumerate(program.inputs[:n])]
        outs = [f.values[o] for o in program.outputs]
        if before is not None:
            outs = [s.add(a, b) for a, b in zip(so_far[n:], outs, strict=True)]
        return s.section(name, [*at_rest, *data, *so_far], [*grads, *outs])

    first = microbatch("first", None)
    following = microbatch("following", first.outputs) if accumulate > 1 else None
    unreduced = s.like(first.outputs)
    # Last gradients first: they were there first.
    reduced = s.convert(list(reversed(unreduced[:n])), list(reversed(final)), "reduce", bucket)
    finish, compared = finished(s, unreduced, list(reversed(reduced)), tokens)
    return Gradients(first, following, finish, compared)


def key_types(program: GlobalProgram) -> list[Type]:
    """Types of the keys that a program draws by: its last inputs."""
    return [Type(torch.int64, (2,), ((),))] * len(program.drawn)


def _zeros(s: Stitcher, t: Type) -> int:
    shape = t.local_shape(s.mesh)
    return s.small(lambda: [torch.zeros(shape, dtype=t.dtype, device=s.funcs.device)], [], t, "zeros", (shape, t.dtype))


@dataclasses.dataclass
class Updates:
    """The sections that use gradients.

    `init` gives the optimizer's state from the parameters; `check` gives the loss, the gradients' norm and what
    `update` needs of both; `update` gives new parameters and state. The state's types and structure belong to it.
    `early` are the places, in the list of all state, parameters and keys, of those that `check` reads after the
    gradients. `drawn` are the numbers of the calls that draw, whose keys are the last inputs of `init` and `update`.
    Where the update reads `numbers`, `check` gives them as one vector after loss and norm.
    """

    init: Section
    check: Section
    update: Section
    state_types: list[Type]
    state_tree: Any
    early: list[int]
    drawn: dict[str, tuple[int, ...]]
    numbers: Numbers


def _mean_factor(count: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return count.to(dtype).reciprocal()


def _narrowed(norm: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A norm in the dtype of the gradients; infinite where that can't hold its square, as second moments have to."""
    return torch.where((norm * norm).to(dtype).isinf(), math.inf, norm).to(dtype)


def _is_cheap(unit: Unit) -> bool:
    """Whether a unit is one pointwise operator for each element, casts aside."""
    work = [n for n in unit.graph.nodes if n.op == "call_function" and n.target not in POINTWISE]
    return len(work) <= 1 and all(is_pointwise(n) for n in work)


def _quotient(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return total / count


def optimizer_sections(
    s: Stitcher,
    optimizer: Transform,
    params: Parameters,
    reduced: Sequence[int],
    bucket: int,
    adjust: Callable[[Any, Sequence[Any]], Any] | None = None,
) -> Updates:
    """Builds the optimizer's sections: its pure functions are traced and partitioned by the same rules as the model.

    Args:
        s: where to build.
        optimizer: the (init, update) pair.
        params: the parameters.
        reduced: the reduced gradients, sum, count and auxiliary values, as values of an earlier section.
        bucket: bytes that travel together, at most, when updated parameters are gathered.
        adjust: (updated parameters, leaves of the auxiliary values) -> parameters, as part of the update.
    """
    device, n = s.funcs.device, len(params.types)

    def build(leaves: Sequence[Any]) -> Any:
        return tree.unflatten(params.treedef, leaves)

    at_rest = params.at_rest()
    init_program = trace(optimizer.init, (build(avals(at_rest, device)),), "optimizer.init", operators=True)
    resting = [s.new(t) for t in (*at_rest, *key_types(init_program))]
    f = s.forward(init_program, resting, dict(enumerate(t.opt for t in params.types)))
    s.run_forward(f, {}, set())
    state_types = [resolved(t) for t in f.out_types()]
    state = s.convert([f.values[o] for o in init_program.outputs], state_types, "optimizer.init")
    init = s.section("init", resting, s.contiguous(state))

    def update(grads: Any, total: Any, count: Any, aux: Any, old: Any, values: Any) -> Any:
        # What the check needs is made of blocks: operators outside of blocks would share a unit with the update's.
        loss = block(_quotient, name="loss")(total, count)
        # One number, not a pass over all gradients: whoever reads them multiplies by it.
        factor = block(_mean_factor, name="mean")(count, norm_dtype)
        moved = [g for i, g in enumerate(tree.leaves(grads)) if i not in params.frozen]
        norm = block(_narrowed, name="norm")(scaled_norm(moved, factor), norm_dtype)
        values, new = optimizer.step(grads, old, values, factor)
        return loss, norm, values if adjust is None else adjust(values, aux), new

    grad_types = params.gradients()
    norm_dtype = leaf.widest(t.dtype for t in grad_types)
    program = trace(
        update,
        (
            build(avals(grad_types, device)),
            *avals([s.types[v] for v in reduced[n : n + 2]], device),
            avals([s.types[v] for v in reduced[n + 2 :]], device),
            tree.unflatten(init_program.out_tree, avals(state_types, device)),
            build(avals(at_rest, device)),
        ),
        "optimizer",
        operators=True,
    )
    inputs = [*s.like(reduced), *(s.new(t) for t in (*state_types, *at_rest, *key_types(program)))]
    program, parts = in_parts(s, program, inputs[:n], program.outputs[1])
    f = s.forward(program, [*inputs, *parts], {})
    rows = [call.rows for call in f.calls]
    early = by_output(rows, program.outputs[:2], checked(program))
    s.run_forward(f, {}, set(), early)
    loss, norm = s.convert(
        [f.values[o] for o in program.outputs[:2]],
        [resolved(s.types[f.values[o]]) for o in program.outputs[:2]],
        "check",
    )
    # What is as cheap as reading its result is made again by the update, and not kept in between.
    kept = [k for k in early if not _is_cheap(program.units[rows[k][0].unit])]
    late = by_output(rows, program.outputs[2 : 2 + n], program.outputs[2 + n :], done=kept)
    counters = program.inputs[len(reduced) : len(reduced) + len(state_types)]
    numbers = Numbers.of(program, f, rows, [*program.inputs[n : n + 2], *counters], early, late)
    # Numbers that the update reads are made before it, and looked at.
    s.run_forward(f, {}, set(), numbers.ahead)
    kept += numbers.ahead
    late = [k for k in late if k not in numbers.ahead]
    vector = numbers.vector(s, f)
    made = {o for k in kept for row in rows[k] for o in row.outs}
    used = {a for k in late for row in rows[k] for a in row.args}
    carried = sorted({f.values[a] for a in (used | set(program.outputs[2:])) & made})
    given = set(program.inputs)
    # Gradients that the update takes as they came stay alive across the check.
    taken = {f.values[a] for a in used & given}
    passed = [v for v in inputs[: n + 2] if v in taken]
    # A call that makes the norm may make more of the optimizer's small values, such as the number of the next step.
    read = {f.values[a] for k in (*early, *numbers.ahead) for row in rows[k] for a in row.args if a in given}
    read |= {f.values[v] for v in numbers.names if v in given}
    rest = inputs[n + 2 :]
    at = [i for i, v in enumerate(rest) if v in read]
    s.instrs = at_its_use(s.instrs, parts)
    check = s.section("check", [*inputs[: n + 2], *(rest[i] for i in at)], [loss, norm, *vector, *carried, *passed])
    s.run_forward(f, {}, set(), late)
    outs = [f.values[o] for o in program.outputs[2:]]
    new_params = s.convert(outs[:n], at_rest, "store", bucket)
    new_state = s.convert(outs[n:], state_types, "optimizer.state")
    outs = s.contiguous([*new_params, *new_state])
    section = s.section("update", [*carried, *passed, *rest], outs)
    drawn = {INIT: init_program.drawn, UPDATE: program.drawn}
    return Updates(init, check, section, state_types, init_program.out_tree, at, drawn, numbers)


def loss_function(loss_fn: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    """The loss function with its results as one list, sum and count first, checked."""

    def wrapped(params: Any, batch: Any) -> list[torch.Tensor]:
        out = loss_fn(params, batch)
        good = isinstance(out, tuple) and len(out) in (2, 3)
        scalars = good and all(isinstance(x, torch.Tensor) and x.ndim == 0 for x in out[:2])
        if not scalars or not out[0].is_floating_point() or out[1].is_complex():
            results = out if isinstance(out, tuple) else (out,)
            kinds = [repr(Type.whole(x)) if isinstance(x, torch.Tensor) else type(x).__name__ for x in results]
            fail(
                ShapeError,
                call=f"{getattr(loss_fn, '__name__', 'loss_fn')}(params, batch)",
                got=f"({', '.join(kinds)})" if isinstance(out, tuple) else kinds[0],
                number="the result is not (sum, count) or (sum, count, aux) of 0-dim tensors, the sum floating point, "
                "the count no complex number",
                rule="a loss is a sum and the count that normalises it: a mean of means weighs tokens unequally",
                fix="return nll.sum(), valid.sum()",
            )
        aux = tree.flatten(out[2])[0] if len(out) == 3 else []
        wrapped.aux_tree = tree.structure(out[2]) if len(out) == 3 else None  # type: ignore[attr-defined]
        return [out[0], wide_count(out[1]), *aux]

    return wrapped


def wide_count(count: torch.Tensor) -> torch.Tensor:
    """A count in a dtype in which those of all microbatches and ranks can be added: bools would be joined by `or`."""
    return count.to(torch.float64 if count.is_floating_point() else torch.int64)
