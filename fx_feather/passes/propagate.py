"""Propagation: every value of a global unit gets a type; what does not fit is an error here, at the user's own line."""

import operator
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..errors import AmbiguousError, FeatherError, RuleError, ShapeError, SpecError, fail, raise_all
from ..layout import Layout, undivided
from ..mesh import Mesh
from ..random_ops import refuse_kind
from ..rules import Conflict, OpCall, Operand, Rule, Sharding, lookup, solve
from ..rules.local import fill
from ..source import label, user_line
from ..spec import Type
from ..trace import trace_unit
from ..unit import Aval, Unit
from .plan import CustomStep, OpStep, Plan, RegionStep, Root, SubStep, Value


def propagate(
    unit: Unit,
    in_types: Sequence[Type],
    mesh: Mesh,
    layout: Layout,
    logical: Sequence[Type | None] | None = None,
    where: fx.Node | None = None,
) -> Plan:
    """Gives every value of `unit` a type.

    Args:
        unit: a graph of whole tensors.
        in_types: types of its inputs, as they come in.
        mesh: the ranks.
        layout: what `constrain` means.
        logical: for inputs that count as having another type than they come in with, that type (a parameter rests
            more split than it is used).
        where: the node whose decomposition this is; its source line is shown in errors.

    Raises:
        AmbiguousError: operands that do not fit together, with the `constrain` calls that settle it.
        RuleError: an operator without a rule on a split operand.
        ShapeError: a `constrain` whose dims the mesh does not divide.
    """
    plan = Plan(unit, mesh, [], {}, {}, [])
    env: dict[fx.Node, Value | list[Value]] = {}
    given = iter(zip(in_types, logical or [None] * len(in_types), strict=True))

    def new(root: Root, t: Type, seen: Type | None = None) -> Value:
        plan.types[root] = t
        return Value(root, t if seen is None else seen)

    for n in unit.graph.nodes:
        match n.op:
            case "placeholder":
                t, seen = next(given)
                env[n] = new((n, 0), t, seen)
                plan.inputs.append((n, 0))
            case "get_attr":
                env[n] = new((n, 0), Type.whole(unit.constants[n.target]))
            case "output":
                for o in n.args[0]:
                    v = env[o]
                    assert isinstance(v, Value)
                    plan.outputs.append((v.root, v.logical))
            case _ if n.target is operator.getitem:
                source = env[n.args[0]]
                assert isinstance(source, list)
                env[n] = source[n.args[1]]
            case _ if n.target is torch.ops.fx_feather.constrain.default:
                env[n] = _constrain(n, env[n.args[0]], mesh, layout)
            case _ if n.target is torch.ops.fx_feather.region.default:
                env[n] = _manual(plan, n, env)
            case _ if n.target is torch.ops.fx_feather.custom.default:
                env[n] = _custom(plan, n, env, layout, where)
            case _:
                env[n] = _operator(plan, n, env, layout, where)
    return plan


def _constrain(n: fx.Node, v: Any, mesh: Mesh, layout: Layout) -> Value:
    names = tuple(n.args[1].split())
    t = Type(v.logical.dtype, v.logical.shape, layout.value_dims(names), names=names)
    raise_all(ShapeError, undivided(t, mesh, f"constrain(x, {n.args[1]!r}) at {user_line(n)}"))
    return Value(v.root, t)


def _manual(plan: Plan, n: fx.Node, env: dict[fx.Node, Any]) -> list[Value]:
    region = plan.unit.regions[n.args[1]]
    if region.mesh != plan.mesh:
        fail(
            SpecError,
            call=f"shard_map({region.name}, mesh={region.mesh!r}) at {user_line(n)}",
            got=f"a program for {plan.mesh!r}",
            number=f"{region.mesh!r} is not {plan.mesh!r}",
            rule="a manual region runs on the mesh of the program that it is part of",
            fix=f"shard_map(..., mesh={plan.mesh!r})",
        )
    operands = [(env[a].root, t) for a, t in zip(n.args[0], region.in_types, strict=True)]
    plan.steps[n] = RegionStep(region, operands)
    return _results(plan, n, list(region.out_types))


_KEEP_COUNTING = {
    getattr(torch.ops.aten, name)
    for name in ("alias", "detach", "clone", "to", "_to_copy", "unsqueeze", "view", "reshape", "lift_fresh_copy")
}


def counts(n: fx.Node) -> int | None:
    """The dim along which a value of the program is 0, 1, 2, …, as `arange(n)` and `arange(n)[:, None]` are."""
    x, shape = n, tuple(n.meta["val"].shape)
    while getattr(x.target, "overloadpacket", None) in _KEEP_COUNTING and isinstance(x.args[0], fx.Node):
        x = x.args[0]
    start, step = {"default": (0, 1), "start": (x.args[0] if x.args else 0, 1)}.get(
        getattr(x.target, "_overloadname", ""), (None, None)
    )
    if getattr(x.target, "overloadpacket", None) is not torch.ops.aten.arange or (start, step) != (0, 1):
        return None
    long = [d for d, size in enumerate(shape) if size != 1]
    return long[0] if len(long) == 1 and not n.meta["val"].is_floating_point() else None


def _custom(plan: Plan, n: fx.Node, env: dict[fx.Node, Any], layout: Layout, where: fx.Node | None) -> list[Value]:
    custom, values = n.meta["function"], [env[a] for a in n.args[0]]
    split = frozenset(a for v in values for a in (*v.logical.sharded, *v.logical.replicated))
    # Sums are resolved before it. What differs between ranks in one operand does so in the gradients of all.
    types = [
        v.logical.with_(partial=frozenset(), replicated=frozenset(split - v.logical.sharded)) for v in values
    ]  # fmt: skip
    forward = propagate(custom.forward, types, plan.mesh, layout, None, where or n)
    cts = [t.cotangent() for i, t in enumerate(forward.out_types) if i not in custom.fixed]
    backward = propagate(custom.backward, [*types, *forward.out_types, *cts], plan.mesh, layout, None, where or n)
    wanted = [t.cotangent() for t in types if t.dtype.is_floating_point or t.dtype.is_complex]
    backward.outputs = [(root, t) for (root, _), t in zip(backward.outputs, wanted, strict=True)]
    plan.steps[n] = CustomStep(
        forward, backward, [(v.root, t) for v, t in zip(values, types, strict=True)], custom.fixed
    )
    return _results(plan, n, forward.out_types)


def op_call(n: fx.Node) -> tuple[OpCall, list[fx.Node]]:
    """The call that a node makes, and the nodes of its tensor operands."""
    nodes: list[fx.Node] = []

    def operand(x: Any) -> Any:
        if isinstance(x, fx.Node):
            nodes.append(x)
            val = x.meta["val"]
            return Operand(len(nodes) - 1, tuple(val.shape), val.dtype, counts(x))
        if isinstance(x, (list, tuple)):
            return [operand(y) for y in x] if isinstance(x, list) else tuple(operand(y) for y in x)
        return x

    args = tuple(operand(a) for a in n.args)
    kwargs = {k: operand(v) for k, v in n.kwargs.items()}
    found: list[Operand] = []

    def collect(x: Any) -> None:
        if isinstance(x, Operand):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            for y in x:
                collect(y)

    for a in (*args, *kwargs.values()):
        collect(a)
    val = n.meta["val"]
    outs = [v for v in (val if isinstance(val, (list, tuple)) else [val]) if v is not None]
    results = tuple(Operand(i, tuple(v.shape), v.dtype) for i, v in enumerate(outs))
    return OpCall(n.target, args, kwargs, tuple(found), results), nodes


def _factors(rule: Rule, call: OpCall, n: fx.Node, where: fx.Node | None) -> Sharding:
    try:
        return rule.shard(call)
    except FeatherError as e:
        # A rule knows the operator that it refuses, not where that was written.
        first, _, rest = str(e).partition("\n")
        raise type(e)(f"{first} at {user_line(where or n)}\n{rest}") from None


def _operator(plan: Plan, n: fx.Node, env: dict[fx.Node, Any], layout: Layout, where: fx.Node | None) -> Any:
    call, nodes = op_call(n)
    values: list[Value] = [env[a] for a in nodes]
    types = [v.logical for v in values]
    rule = lookup(call)
    if rule is None and _composite(n.target) and any(t.sharded for t in types):
        return _decomposed(plan, n, call, values, n.target, layout, where, operators=True)
    if rule is None:
        rule = _unruled(n, call, nodes, types, plan.mesh, where)
    sharding = _factors(rule, call, n, where)
    try:
        solution = solve(sharding, types, plan.mesh)
    except Conflict as c:
        if c.kind in rule.decomposed_for and rule.decompose is not None:
            return _decomposed(plan, n, call, values, rule.decompose, layout, where)
        advice = rule.advice if c.kind == "whole" else ""
        _ambiguous(n, call, nodes, sharding, types, c, plan.mesh, layout, where, advice)
    names = _names(sharding, types)
    results = tuple(
        t.with_(dtype=o.dtype, shape=o.shape, names=tuple(names.get(d[0], "_") if d else "_" for d in factors))
        for t, o, factors in zip(solution.results, call.outs, sharding.results, strict=True)
    )
    step = OpStep(call, sharding, solution, [], results)
    step.operands = [(v.root, t) for v, t in zip(values, solution.targets, strict=True)]
    plan.steps[n] = step
    return _results(plan, n, list(results))


def _results(plan: Plan, n: fx.Node, types: list[Type]) -> Any:
    out = []
    for i, t in enumerate(types):
        plan.types[n, i] = t
        out.append(Value((n, i), t))
    return out if isinstance(n.meta["val"], (list, tuple)) else out[0]


def _names(s: Sharding, types: Sequence[Type]) -> dict[str, str]:
    """Dim names by factor, as far as the operands have any."""
    out: dict[str, str] = {}
    for factors, t in zip(s.operands, types, strict=True):
        for dim, name in zip(factors, t.names or (), strict=False):
            if len(dim) == 1 and name != "_":
                out.setdefault(dim[0], name)
    return out


def _decomposed(
    plan: Plan,
    n: fx.Node,
    call: OpCall,
    values: list[Value],
    decompose: Callable[..., Any],
    layout: Layout,
    where: fx.Node | None,
    operators: bool = False,
) -> Any:
    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        out = decompose(*fill(call.args, tensors), **fill(dict(call.kwargs), tensors))
        return list(out) if isinstance(out, (list, tuple)) else [out]

    unit = trace_unit(flat, [Aval.of(a.meta["val"]) for a in op_call(n)[1]], str(n.target), operators)
    inner = propagate(
        unit, [plan.types[v.root] for v in values], plan.mesh, layout, [v.logical for v in values], where or n
    )
    plan.steps[n] = SubStep(inner, [v.root for v in values])
    return _results(plan, n, inner.out_types)


def _composite(op: Any) -> bool:
    """Whether torch itself makes an operator of others, so that it needs no rule of its own."""
    return (
        isinstance(op, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.is_mutable
        and op._can_decompose()
    )


def _unruled(
    n: fx.Node, call: OpCall, nodes: list[fx.Node], types: list[Type], mesh: Mesh, where: fx.Node | None
) -> Rule:
    """An operator without a rule may take whole values, and computes the same on every rank."""
    if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()):
        refuse_kind(n.target, user_line(where or n))
    schema = getattr(n.target, "_schema", None)
    # torch.tensor(...) records a detach_, which writes nothing.
    in_place = schema is not None and schema.is_mutable and n.target is not torch.ops.aten.detach_.default
    # In place is refused on whole values too: they may be the caller's, or stand for several equal ones.
    if in_place or any(t.sharded for t in types):
        listing = "\n".join(f"{label(a)}: {t} {_named(t)}" for a, t in zip(nodes, types, strict=True))
        name = str(getattr(n.target, "name", lambda: n.target)())
        fail(
            RuleError,
            call=f"{name} at {user_line(where or n)}",
            got=f"{listing}\non {mesh!r}",
            number="it changes its operand in place" if in_place else "no rule says how this operator is split",
            rule="a model is a pure function: it makes new values"
            if in_place
            else "an operator without a rule takes whole operands only",
            fix=f"write the operator without the trailing underscore ({name.partition('.')[0].rstrip('_')})"
            if in_place
            else f'ff.rule("{name}", "{_whole_pattern(call)}")\nwith ! taken off the dims that may be split; dims of '
            "one size have one letter here: see that they are one factor",
        )
    operands = tuple(tuple((f"{i}.{d}",) for d in range(len(t.shape))) for i, t in enumerate(types))
    results = tuple(tuple((f"out{i}.{d}",) for d in range(o.ndim)) for i, o in enumerate(call.outs))
    sizes = {f[0]: n for dims, t in zip(operands, types, strict=True) for f, n in zip(dims, t.shape, strict=True)}
    sizes |= {f[0]: n for dims, o in zip(results, call.outs, strict=True) for f, n in zip(dims, o.shape, strict=True)}
    return Rule(lambda _: Sharding(operands, results, sizes, whole=frozenset(sizes)))


def _whole_pattern(call: OpCall) -> str:
    """A pattern of the call in which nothing may be split. Dims of one size are taken for one factor."""
    letters: dict[tuple[int, int], str] = {}

    def dims(x: Operand) -> str:
        # The second dim of a size in one tensor is another factor than the first.
        keys = [(n, x.shape[:d].count(n)) for d, n in enumerate(x.shape)]
        return " ".join("!" + letters.setdefault(k, _letter(len(letters))) for k in keys)

    return f"{', '.join(map(dims, call.operands))} -> {', '.join(map(dims, call.outs))}"


def _letter(i: int) -> str:
    return string.ascii_lowercase[i % 26] + (str(i // 26) if i >= 26 else "")


def _named(t: Type) -> str:
    return f"({' '.join(t.names)})" if t.names else ""


def _ambiguous(
    n: fx.Node,
    call: OpCall,
    nodes: list[fx.Node],
    sharding: Sharding,
    types: list[Type],
    conflict: Conflict,
    mesh: Mesh,
    layout: Layout,
    where: fx.Node | None,
    advice: str,
) -> Any:
    made = {a: f", made at {user_line(a)}" for a in nodes if a.meta.get("stack_trace")}
    rows = [f"{label(a)}: {t} {_named(t)}{made.get(a, '')}" for a, t in zip(nodes, types, strict=True)]
    listing = "\n".join(dict.fromkeys(rows))
    tried = []
    for i in sorted(set(conflict.operands)):
        for names in _candidates(types[i], conflict.axis, layout):
            settled = types[i].with_(dims=layout.value_dims(names), partial=frozenset(), replicated=frozenset())
            if undivided(settled.with_(names=names), mesh, ""):
                continue
            # A value may be several operands at once.
            trial = [settled if a is nodes[i] else t for a, t in zip(nodes, types, strict=True)]
            try:
                solve(sharding, trial, mesh)
            except Conflict:
                continue
            tried.append(f'{label(nodes[i])} = ff.constrain({label(nodes[i])}, "{" ".join(names)}")')
    fixes = (
        "\nor ".join(dict.fromkeys(tried)) or "split fewer of these dims in the layout: no single constrain settles it"
    )
    fail(
        AmbiguousError,
        call=f"{n.target} at {user_line(where or n)}",
        got=f"{listing}\non {mesh!r}",
        number=conflict.detail,
        rule=_REASONS[conflict.kind],
        fix=(f"{fixes}\n(each was tried)" if tried else fixes) + (f"\nor {advice}" if advice else ""),
    )


_REASONS = {
    "axis": "an axis splits one factor of an operator; which operand should be gathered is for the model to say",
    "order": "a factor is split by the same axes in the same order in all operands",
    "whole": "the operator needs this dim whole on each rank",
    "divide": "a dim that is regrouped is split into equal parts",
    "merge": "of a merged dim only the major part can be split: ranks would hold strided pieces otherwise",
}


def _candidates(t: Type, axis: str, layout: Layout) -> Iterator[tuple[str, ...]]:
    """Dim names for a value that leave it split as it is, but for one axis."""
    names = []
    for d, axes in enumerate(t.dims):
        want = tuple(a for a in axes if a != axis)
        own = t.names[d] if t.names else "_"
        options = [own, *layout.compute, "_"] if axes == want else [*layout.compute, "_"]
        names.append(next((o for o in options if layout.value_dims((o,)) == (want,)), "_"))
    if sum(1 for x in names if x != "_") == len({x for x in names if x != "_"}):
        yield tuple(names)
