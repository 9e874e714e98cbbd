"""The law of rules: an operator on parts, joined again, is the operator on the whole, and so are its gradients."""

import functools as ft
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fx_feather.collectives import executed_by
from fx_feather.errors import FeatherError
from fx_feather.layout import Layout
from fx_feather.mesh import Mesh
from fx_feather.passes import propagate as propagation
from fx_feather.passes.partition import partition
from fx_feather.passes.propagate import op_call, propagate
from fx_feather.rules import RULES, OpCall, Rule, lookup
from fx_feather.spec import Type, assemble, pad_to, shard
from fx_feather.trace import Aval, trace_unit
from tests.laws.rule_samples import SAMPLES, UNDEFINED, Arg

MESHES = [Mesh(a=2), Mesh(a=3), Mesh(a=2, b=2), Mesh(a=3, b=2)]
#: For each mesh, how many choices of types that a rule accepts are checked, and how many are tried.
CHECKED, TRIED = 5, 16
CASES = [(name, i) for name in SAMPLES for i in range(len(SAMPLES[name]))]


class Lockstep:
    """Runs one function on all ranks at once, a thread each; they meet at every collective."""

    pool = ThreadPoolExecutor(max(m.size for m in MESHES))

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.rank = threading.local()
        self.slots: list[Any] = [None] * mesh.size
        self.barrier = threading.Barrier(mesh.size)

    def __call__(self, collective: Any, x: Any, axes: tuple[str, ...], n: int, static: dict[str, Any]) -> Any:
        me = self.rank.value
        group = next(g for g in self.mesh.groups(axes) if me in g)
        if x is None:
            return torch.tensor(group.index(me))
        self.slots[me] = (collective.name, axes, x.detach())
        self.barrier.wait()
        mine = [self.slots[r] for r in group]
        assert len({m[:2] for m in mine}) == 1, "ranks call different collectives"
        out = collective.reference([m[2] for m in mine], **static)[group.index(me)].clone()
        self.barrier.wait()
        return out

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            self.rank.value = rank
            try:
                return fn(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with executed_by(self):
            futures = [self.pool.submit(one, r) for r in range(self.mesh.size)]
            errors = [e for f in futures if (e := f.exception()) is not None]
        for e in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise e
        return [f.result() for f in futures]


def states(arg: Aval, mesh: Mesh) -> Iterator[Type]:
    """Every type that a value may have on a mesh."""
    dims = range(len(arg.shape))
    floats = arg.dtype.is_floating_point
    options = ["I", "R", *(["partial"] if floats else []), *dims]
    for choice in itertools.product(options, repeat=len(mesh.axes)):
        of = dict(zip(mesh.axes, choice, strict=True))
        split = tuple(tuple(a for a in mesh.axes if of[a] == d) for d in dims)
        partial, replicated = (frozenset(a for a in mesh.axes if of[a] == s) for s in ("partial", "R"))
        yield Type(arg.dtype, arg.shape, split, partial, replicated)
        if any(len(d) == 2 for d in split):
            yield Type(arg.dtype, arg.shape, tuple(d[::-1] for d in split), partial, replicated)


def assignments(avals: Sequence[Aval], mesh: Mesh, seed: str) -> list[tuple[Type, ...]]:
    """Types for all operands: every choice in a fixed random order, or as many as are tried."""
    rng = random.Random(seed)
    each = [list(states(a, mesh)) for a in avals]
    total = ft.reduce(lambda n, e: n * len(e), each, 1)
    if total <= TRIED:
        every = list(itertools.product(*each))
        rng.shuffle(every)
        return every
    return [tuple(rng.choice(e) for e in each) for _ in range(TRIED)]


def parts(x: torch.Tensor, t: Type, mesh: Mesh, g: torch.Generator, garbage: bool) -> list[torch.Tensor]:
    """Local values of a whole one: a pending sum in random parts, and anything at all in the padding."""
    axes = tuple(a for a in mesh.axes if a in t.partial)
    terms = [torch.randn(x.shape, generator=g, dtype=x.dtype) for _ in range(mesh.count(axes) - 1)] if axes else []
    terms.append(x - sum(terms) if terms else x)
    plain = t.with_(partial=frozenset())
    out = [shard(terms[mesh.index(r, axes) if axes else 0], plain, mesh, r) for r in range(mesh.size)]
    if garbage and (x.dtype.is_floating_point or x.dtype == torch.bool):
        for r, local in enumerate(out):
            true = pad_to(shard(torch.ones(x.shape, dtype=torch.float64), plain, mesh, r), tuple(local.shape)) != 0
            anything = torch.rand(local.shape, generator=g, dtype=torch.float64) + 0.5
            out[r] = torch.where(true, local, anything > 0.8 if x.dtype == torch.bool else anything.to(x.dtype))
    return out


def joined(values: list[torch.Tensor], t: Type, mesh: Mesh) -> torch.Tensor:
    """The whole value; where a type says that ranks have the same, they must."""
    for axis in mesh.axes:
        if t.state(axis) in ("I", "R"):
            for group in mesh.groups((axis,)):
                first = true_part(values[group[0]], t, mesh, group[0])
                for r in group[1:]:
                    torch.testing.assert_close(true_part(values[r], t, mesh, r), first, rtol=1e-12, atol=1e-12)
    return assemble(values, t, mesh)


def true_part(x: torch.Tensor, t: Type, mesh: Mesh, rank: int) -> torch.Tensor:
    """A local value with its padding set to zero."""
    return torch.where(true_mask(t, mesh, rank), x, torch.zeros((), dtype=x.dtype))


def true_mask(t: Type, mesh: Mesh, rank: int) -> torch.Tensor:
    """Which elements of a local value are no padding."""
    return shard(torch.ones(t.shape, dtype=torch.bool), t.with_(partial=frozenset()), mesh, rank)


class Sample:
    """One sample traced, with its whole values and gradients."""

    def __init__(self, name: str, fn: Callable[..., Any], args: list[Arg]):
        self.name = name
        self.g = torch.Generator().manual_seed(0)
        self.args = [a.make(self.g) for a in args]
        self.taken = [a.kind in ("float", "positive", "complex") for a in args]

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            out = fn(*tensors)
            return list(out) if isinstance(out, (list, tuple)) else [out]

        self.avals = [Aval.of(x) for x in self.args]
        self.unit = trace_unit(flat, self.avals, name)
        leaves = [x.clone().requires_grad_(t) for x, t in zip(self.args, self.taken, strict=True)]
        self.outs = flat(*leaves)
        self.cts = [
            torch.randn(o.shape, generator=self.g, dtype=o.dtype) if o.requires_grad else None for o in self.outs
        ]
        self.grads = pulled(self.outs, leaves, self.cts)

    def check(self, types: Sequence[Type], mesh: Mesh) -> bool:
        """Whether these types are accepted; what is accepted must be right."""
        try:
            plan = propagate(self.unit, types, mesh, Layout())
        except FeatherError:
            return False
        local = partition(plan)
        given = [parts(x, t, mesh, self.g, True) for x, t in zip(self.args, types, strict=True)]
        cts = [
            None if c is None else parts(c, t.cotangent(), mesh, self.g, False)
            for c, t in zip(self.cts, plan.out_types, strict=True)
        ]

        def one(rank: int) -> Any:
            leaves = [v[rank].clone().requires_grad_(t) for v, t in zip(given, self.taken, strict=True)]
            outs = local(*leaves)
            return outs, pulled(outs, leaves, [None if c is None else c[rank] for c in cts])

        ranks = Lockstep(mesh).run(one)
        for i, (whole, t) in enumerate(zip(self.outs, plan.out_types, strict=True)):
            got = joined([outs[i].detach() for outs, _ in ranks], t, mesh)
            torch.testing.assert_close(got, whole.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
            for r, (outs, _) in enumerate(ranks):
                # The cotangent of padding is 0, and 0 times what is not finite would be NaN in a later product.
                padding = outs[i][~true_mask(t, mesh, r)]
                assert padding.isfinite().all(), f"result {i} has {padding} in its padding"
        for i, (grad, t) in enumerate(zip(self.grads, types, strict=True)):
            if grad is not None:
                got = joined([zero_if_none(grads[i], t, mesh) for _, grads in ranks], t.cotangent(), mesh)
                torch.testing.assert_close(got, grad, rtol=1e-12, atol=1e-11)
        return True


def zero_if_none(x: torch.Tensor | None, t: Type, mesh: Mesh) -> torch.Tensor:
    return torch.zeros(t.local_shape(mesh), dtype=t.dtype) if x is None else x


def pulled(outs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], cts: Sequence[Any]) -> list[Any]:
    """Gradients of the leaves, None for those that take none."""
    pairs = [(o, c) for o, c in zip(outs, cts, strict=True) if c is not None and o.requires_grad]
    want = [x for x in leaves if x.requires_grad]
    if not pairs or not want:
        return [None] * len(leaves)
    got = iter(torch.autograd.grad([o for o, _ in pairs], want, [c for _, c in pairs], allow_unused=True))
    return [next(got) if x.requires_grad else None for x in leaves]


@pytest.fixture(autouse=True, scope="module")
def _traced_once():
    """A decomposition is traced once, not once for each split."""
    seen: dict[Any, Any] = {}

    def cached(flat: Any, avals: Any, label: str, operators: bool) -> Any:
        key = (label, operators, tuple(avals), repr([c.cell_contents for c in flat.__closure__ or ()]))
        if key not in seen:
            seen[key] = trace_unit(flat, avals, label, operators)
        return seen[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(propagation, "trace_unit", cached)
        yield


@ft.cache
def sample_of(name: str, i: int) -> Sample:
    return Sample(name, *SAMPLES[name][i])


@pytest.mark.parametrize(("name", "i"), CASES, ids=[f"{n}-{i}" for n, i in CASES])
def test_parts_make_the_whole(name: str, i: int):
    sample = sample_of(name, i)
    for mesh in MESHES:
        left = CHECKED
        for types in assignments(sample.avals, mesh, f"{name}{i}{mesh}"):
            try:
                left -= sample.check(types, mesh)
            except Exception as e:
                e.add_note(f"{name} of {[t.show(True) for t in types]} on {mesh}")
                raise
            if not left:
                break


@pytest.mark.parametrize(("name", "i"), CASES, ids=[f"{n}-{i}" for n, i in CASES])
def test_every_factor_that_is_not_whole_can_be_split(name: str, i: int):
    sample = sample_of(name, i)
    nodes = [n for n in sample.unit.graph.nodes if n.op == "call_function" and str(n.target) == name]
    # Torch traces `lift_fresh` as a constant.
    assert len(nodes) == (name != "aten.lift_fresh.default")
    for call, _ in map(op_call, nodes):
        rule = lookup(call)
        assert rule is not None
        for f, size, owners in splittable(rule, call):
            for ranks, some in itertools.product((2, 3), (owners, owners[:1], owners[-1:])):
                types = [
                    Type(a.dtype, a.shape, tuple(("a",) if (k, d) in some else () for d in range(len(a.shape))))
                    for k, a in enumerate(sample.avals)
                ]
                accepted = sample.check(types, Mesh(a=ranks))
                # Where it does not divide, a rule may refuse.
                assert accepted or size % ranks, f"{f} of {name}: {types}"


def splittable(rule: Rule, call: OpCall) -> Iterator[tuple[str, int, list[tuple[int, int]]]]:
    """The factors that may be split, their sizes, and where they are: operand and dim."""
    s = rule.shard(call)
    for f, n in s.sizes.items():
        places = [(k, d) for k, dims in enumerate(s.operands) for d, dim in enumerate(dims) if dim[:1] == (f,)]
        minor = any(f in dim[1:] for dims in s.results for dim in dims)
        decomposed = rule.decompose is not None and "whole" in rule.decomposed_for
        if places and not minor and (f not in s.whole or decomposed):
            yield f, n, [(k, d) for k, d in places if k not in s.ignored] or places


def test_every_rule_has_a_sample():
    missing = {str(op) for op in RULES} - set(SAMPLES) - UNDEFINED
    assert not missing
