"""Manual regions: per-rank code with named axes, whose typed collectives are written by hand and checked."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from . import collectives as cc
from . import functional, tree
from .collectives.primitive import COLLECTIVES, apply
from .errors import MeshError, ShapeError, SpecError, TypeStateError, fail, message, raise_all
from .manual import TYPED, Context, Record, check_tensors, inside, named
from .mesh import Mesh
from .passes.differentiate import LocalUnit, Place, linearize
from .pure import watched
from .random_ops import check_region
from .rules import call_operator
from .simulate import Simulator
from .source import user_line
from .spec import P, Type, assemble, shard
from .trace import emit_region, tracing
from .unit import Region


def _varying(n: fx.Node, known: dict[fx.Node, frozenset[str]]) -> frozenset[str]:
    """The axes over which a value of a region varies, from its operands."""
    if n not in known:
        stack = [n]
        while stack:
            m = stack[-1]
            todo = [a for a in m.all_input_nodes if a not in known]
            if todo:
                stack.extend(todo)
                continue
            stack.pop()
            union = frozenset().union(*(known[a] for a in m.all_input_nodes))
            if m.target is TYPED:
                axes = frozenset(m.args[2].split(","))
                union = union - axes if COLLECTIVES[m.args[1]].after == "I" else union | axes
            elif m.target is torch.ops.fx_feather.axis_index.default:
                union = frozenset(m.args[0].split(","))
            known[m] = union
    return known[n]


class _Vary(TorchFunctionMode):
    """Inserts `pvary` where an invariant operand meets a varying one, at the level at which a vjp is taken."""

    def __init__(self, known: dict[fx.Node, frozenset[str]], mesh: Mesh):
        super().__init__()
        self.known, self.mesh = known, mesh

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Taking a gradient is no operator: its arguments are not combined with each other.
        machinery = str(getattr(func, "__module__", "")).startswith(("torch.autograd", "torch._functorch"))
        if machinery or getattr(func, "__name__", "") in ("apply", "__get__") or func is TYPED:
            return func(*args, **kwargs)
        leaves, treedef = tree.flatten((args, kwargs))
        states = {
            i: s for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and (s := self._state(x)) is not None
        }
        union = frozenset().union(*states.values())
        changed = False
        for i, state in states.items():
            missing = self.mesh.ordered(union - state)
            if missing and len(states) > 1:
                leaves[i] = Record.apply(leaves[i], "pvary", ",".join(missing), self.mesh.count(missing), (), None)
                changed = True
        if changed:
            args, kwargs = tree.unflatten(treedef, leaves)
        return func(*args, **kwargs)

    def _state(self, x: torch.Tensor) -> frozenset[str] | None:
        mode = get_proxy_mode()
        while torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        slot = mode.tracer.tensor_tracker.get(x) if mode is not None else None
        return None if slot is None else _varying(slot.proxy.node, self.known)


def _as_specs(specs: Any, count: int, call: str, what: str) -> list[P]:
    out = [specs] * count if isinstance(specs, P) else tree.leaves(specs)
    if len(out) != count or not all(isinstance(s, P) for s in out):
        fail(
            SpecError,
            call=call,
            got=f"{what}={specs!r}",
            number=f"{len(out)} specs for {count} tensors",
            rule="one P for all, or a pytree with one P for each tensor",
            fix=f"{what}=P() for values that every rank has whole",
        )
    return out


def shard_map(f: Callable[..., Any], *, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Turns per-rank code into a function of whole values.

    Inside of `f` tensors are local parts, and collectives such as `ff.psum(x, "tp")` name mesh axes. A value is varying
    over an axis or invariant; collectives ask for the right one, an invariant operand that meets a varying one becomes
    varying (`pvary`), and what `out_specs` leaves whole has to be invariant. So gradients are right inside and outside.

    In a compiled function the region becomes part of the program. Called on its own, it runs all ranks in this process,
    and `backward()`, `torch.func.grad` and `torch.func.vjp` differentiate it, to any order.

    Args:
        f: a function of local tensors (pytrees of them), returning a pytree of local tensors.
        mesh: the ranks.
        in_specs: a `P` for each tensor that comes in, or one for all.
        out_specs: likewise for the results.

    Raises:
        MeshError: what is no mesh, or an axis that it lacks.
        SpecError: a spec that does not fit.
        ShapeError: a dim that the mesh does not divide, or what is no tensor.
        TypeStateError: a collective applied to a value in the wrong state, or a result that varies over an axis which
            `out_specs` does not name.

    Source: JAX, `jax.shard_map` and its varying types.

    >>> from fx_feather import Mesh, P, psum
    >>> f = shard_map(lambda x: psum(x.sum(), "tp"), mesh=Mesh(tp=2), in_specs=P("tp"), out_specs=P())
    >>> f(torch.arange(4.0))
    tensor(6.)
    """
    name = getattr(f, "__name__", "f")
    if not isinstance(mesh, Mesh):
        fail(
            MeshError,
            call=f"shard_map({name}, mesh={mesh!r})",
            got=f"a mesh of type {type(mesh).__name__}",
            number=f"{mesh!r} is not a Mesh",
            rule="per-rank code names the axes of a grid of ranks",
            fix="mesh=ff.Mesh(tp=2)",
        )
    call_text = f"shard_map({name}, in_specs={in_specs!r}, out_specs={out_specs!r})"

    def call(*args: Any) -> Any:
        leaves, treedef = tree.flatten(args)
        check_tensors(leaves, call=call_text, what="an argument")
        specs = _as_specs(in_specs, len(leaves), call_text, "in_specs")
        types = [_region_type(x, s, mesh, call_text) for x, s in zip(leaves, specs, strict=True)]
        region, out_tree = _trace_region(f, treedef, types, out_specs, mesh, name, call_text, leaves)
        outs = emit_region(region, leaves) if tracing() else _Eager.apply(region, *leaves)
        return tree.unflatten(out_tree, outs)

    return call


def _region_type(x: torch.Tensor, spec: P, mesh: Mesh, call: str) -> Type:
    axes = [a for d in spec.dims for a in d] + list(spec.partial)
    mesh.check(axes, call=call)
    t = Type(x.dtype, tuple(x.shape), spec.padded(x.ndim), frozenset(spec.partial))
    if not t.even(mesh):
        raise_all(
            ShapeError,
            [
                message(
                    call=call,
                    got=f"{t} on {mesh!r}",
                    number=f"dim {d} has size {n}, axes {list(a)} have {mesh.count(a)} ranks",
                    rule="per-rank code sees equal parts",
                    fix=f"a size of {-(-n // mesh.count(a)) * mesh.count(a)}, or P without {list(a)} on dim {d}",
                )
                for d, (n, a) in enumerate(zip(t.shape, t.dims, strict=True))
                if n % mesh.count(a)
            ],
        )
    return t


def _trace_region(
    f: Any, treedef: Any, types: list[Type], out_specs: Any, mesh: Mesh, name: str, call: str, leaves: list[Any]
) -> tuple[Region, Any]:
    out_tree: Any = None
    known: dict[fx.Node, frozenset[str]] = {}

    def flat(*xs: torch.Tensor) -> list[torch.Tensor]:
        nonlocal out_tree
        mode = get_proxy_mode()
        for x, t in zip(xs, types, strict=True):
            known[mode.tracer.tensor_tracker[x].proxy.node] = t.sharded | t.partial
        with _Vary(known, mesh):
            outs, out_tree = tree.flatten(f(*tree.unflatten(treedef, list(xs))))
        check_tensors(outs, call=call, what="a result")
        return outs

    device = leaves[0].device.type if leaves else "cpu"
    # A region depends on shapes alone: no transform of the caller's has a say while it is traced.
    with (
        inside(Context(mesh, device)),
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        fakes = [torch.empty(t.local_shape(mesh), dtype=t.dtype, device=device) for t in types]
        gm = make_fx(watched(flat, call, region=True))(*fakes)
        check_region(gm.graph, call)
        constants = {n.target: getattr(gm, n.target) for n in gm.graph.find_nodes(op="get_attr")}
        functional.check_region(gm.graph, constants)
    _check_states(gm.graph, known, call)
    outs = list(gm.graph.output_node().args[0])
    specs = _as_specs(out_specs, len(outs), call, "out_specs")
    out_types, problems = [], []
    for o, spec in zip(outs, specs, strict=True):
        val, state = o.meta["val"], _varying(o, known)
        dims = spec.padded(val.ndim)
        mesh.check([a for d in dims for a in d], call=call)
        shape = tuple(n * mesh.count(a) for n, a in zip(val.shape, dims, strict=True))
        t = Type(val.dtype, shape, dims, frozenset(spec.partial))
        out_types.append(t)
        extra = mesh.ordered(state - t.sharded - t.partial)
        if extra:
            problems.append(
                message(
                    call=call,
                    got=f"a result of local shape {list(val.shape)}, varying over {list(mesh.ordered(state))}",
                    number=f"out_specs {spec!r} does not name {list(extra)}",
                    rule="a result that differs between the ranks of an axis has no one value there",
                    fix=f"return ff.psum(..., {extra[0]!r}) or ff.all_gather_invariant(...), "
                    f"or name {extra[0]!r} in out_specs",
                )
            )
    raise_all(TypeStateError, problems)
    return Region(
        name, mesh, tuple(types), tuple(out_types), _local(gm.graph, constants, known, out_types, mesh)
    ), out_tree


def _check_states(graph: fx.Graph, known: dict[fx.Node, frozenset[str]], call: str) -> None:
    problems = []
    for n in graph.nodes:
        if n.target is not TYPED:
            continue
        x, name, axes = n.args[0], n.args[1], frozenset(n.args[2].split(","))
        state, before = _varying(x, known), COLLECTIVES[name].before
        bad = axes & state if before == "I" else axes - state
        if bad:
            have, want = ("varying", "invariant") if before == "I" else ("invariant", "varying")
            consequence = (
                "its sum would count the one value once a rank" if name == "psum" else "its cotangent would be wrong"
            )
            problems.append(
                message(
                    call=f"{name} in {call}, at {user_line(n)}",
                    got=f"an operand of local shape {list(x.meta['val'].shape)}, varying over {sorted(state)}",
                    number=f"it is {have} over {sorted(bad)}",
                    rule=f"{name} is {COLLECTIVES[name].type}: it takes an operand that is {want}; {consequence}",
                    fix=f"drop the {name}" if name in ("psum", "pvary") else f"ff.pvary(x, {sorted(bad)[0]!r}) first",
                )
            )
    raise_all(TypeStateError, problems)


def _local(
    graph: fx.Graph, constants: dict[str, Any], known: dict[fx.Node, frozenset[str]], out_types: list[Type], mesh: Mesh
) -> Callable[..., list[torch.Tensor]]:
    """The per-rank function, with the collectives themselves in the place of their records."""

    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        env: dict[fx.Node, Any] = {}
        given = iter(xs)
        for n in graph.nodes:
            if n.op == "placeholder":
                env[n] = next(given)
            elif n.op == "get_attr":
                env[n] = constants[n.target]
            elif n.op == "output":
                outs = []
                for o, t in zip(n.args[0], out_types, strict=True):
                    missing = mesh.ordered((t.sharded | t.partial) - _varying(o, known))
                    split, partial = [a for a in missing if a in t.sharded], [a for a in missing if a in t.partial]
                    x = cc.pvary(env[o], tuple(split), mesh.count(tuple(split))) if split else env[o]
                    outs.append(cc.keep_first(x, tuple(partial), mesh.count(tuple(partial))) if partial else x)
                return outs
            elif n.target is TYPED:
                x, name, axes, count, static, grad_dtype = n.args
                env[n] = apply(name, env[x], tuple(axes.split(",")), count, named(name, static), grad_dtype)
            else:
                get = lambda m: env[m]  # noqa: E731
                args, kwargs = fx.node.map_arg(n.args, get), fx.node.map_arg(n.kwargs, get)
                env[n] = call_operator(n.target, args, kwargs, user_line(n))
        raise AssertionError("a graph ends with its output")

    return run


class _Eager(torch.autograd.Function):
    """A region on its own: all ranks in this process, forward and backward."""

    @staticmethod
    def forward(region: Region, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        unit, sim = _unit(region, xs), Simulator(region.mesh)
        outs = sim.call(unit.forward, _spread(xs, region.in_types, region.mesh))
        return tuple(assemble(o, t, region.mesh) for o, t in zip(outs[: unit.outputs], region.out_types, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.region, *xs = inputs
        ctx.save_for_backward(*xs)

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        region, xs = ctx.region, ctx.saved_tensors
        unit, sim = _unit(region, xs), Simulator(region.mesh)
        assert unit.backward is not None
        parts = _spread(xs, region.in_types, region.mesh)
        forward = sim.call(unit.forward, parts)
        kept = [parts[i] for i in unit.keeps]
        types = [region.out_types[i].cotangent() for i in unit.cts]
        given = _spread([cts[i] for i in unit.cts], types, region.mesh)
        grads = sim.call(unit.backward, [*kept, *forward[unit.outputs :], *given])
        whole = {
            i: assemble(g, region.in_types[i].cotangent(), region.mesh) for i, g in zip(unit.grads, grads, strict=True)
        }
        return None, *(whole.get(i) for i in range(len(xs)))


def _spread(xs: Sequence[torch.Tensor], types: Sequence[Type], mesh: Mesh) -> list[list[torch.Tensor]]:
    return [[shard(x, t, mesh, r) for r in range(mesh.size)] for x, t in zip(xs, types, strict=True)]


def _unit(region: Region, xs: Sequence[torch.Tensor]) -> LocalUnit:
    needs = [x.is_floating_point() for x in xs]
    cts = [t.dtype.is_floating_point for t in region.out_types]
    places = [Place.contiguous(t, region.mesh) for t in region.in_types]
    device = xs[0].device.type if xs else "cpu"
    with temporarily_clear_interpreter_stack():
        return linearize(region.local, places, needs, cts, device, region.name).cut()
