"""Rules: how one operator behaves under sharding, as a pattern of factors, and the one algorithm that reads them."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import RuleError, fail
from ..mesh import Mesh
from ..spec import Type, local_size

Dim = tuple[str, ...]
Factors = tuple[Dim, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Stands for the i-th tensor operand in the arguments of an operator call."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclasses.dataclass(frozen=True)
class OpCall:
    """One call of an operator in a global program: its arguments, with `Operand`s in place of tensors.

    `outs` are the shapes and dtypes of its results.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Operand, ...]
    outs: tuple[Operand, ...]

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """The argument at a position or of a name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    def dim(self, index: int, name: str = "dim", default: int = 0, ndim: int | None = None) -> int:
        """A dim argument, made non-negative."""
        n = self.operands[0].ndim if ndim is None else ndim
        return self.arg(index, name, default) % max(n, 1)


Rewrite = Callable[[tuple[Any, ...], dict[str, Any], list[tuple[int, ...]]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The factors of one operator call.

    Args:
        operands: for each tensor operand and each of its dims the factors that make it up, major first. A dim that no
            other operand shares and that is broadcast (size 1) has no factors.
        results: the same for each result. A factor of an operand that no result has is summed over.
        sizes: of every factor.
        whole: factors that must not be split, unless the rule has a decomposition.
        linear: sets of operands in which the operator is linear jointly; a set of one is linear alone (a product has
            two such sets, a sum has one set of two).
        spread: a value that is the same everywhere may join a sum of partial ones, held by the first rank (stacking
            many scalars); otherwise the partial ones are resolved (adding to a residual).
        reduced: how a factor that no result has is reduced: `sum`, `max` or `min`.
        even: factors that may be split into equal parts only.
        ignored: operands whose values do not matter, only their shape or dtype. They are taken as they are; the split
            of a dim that has a factor is followed where nothing else decides it.
        rewrite: from (args, kwargs, local shapes of the results) to the arguments of the local call, for operators
            with sizes among their arguments.
        lower: for each factor whose split needs more than the plain local call, the function that computes it. It
            takes (Local, local operands) and returns the local results.
        run: the local call, for operators whose meaning is not the same on a part (`squeeze` of a dim that has size 1
            on one rank only). It takes what a function in `lower` takes.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    spread: bool = False
    reduced: Mapping[str, str] = dataclasses.field(default_factory=dict)
    even: frozenset[str] = frozenset()
    ignored: frozenset[int] = frozenset()
    rewrite: Rewrite | None = None
    lower: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    run: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """How operators of one kind behave under sharding.

    Args:
        shard: gives the factors of a call.
        decompose: the operator written in simpler ones, used when a `whole` factor is split. It takes the operator's
            own arguments and returns its result or tuple of results.
        text: the pattern, for messages.
    """

    shard: Callable[[OpCall], Sharding]
    decompose: Callable[..., Any] | None = None
    text: str = ""


RULES: dict[Any, Rule] = {}


def overloads(name: str) -> list[Any]:
    """All overloads of `aten::name` or `namespace::name`; one overload if the name has a dot."""
    namespace, _, base = name.rpartition("::")
    base, _, overload = base.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace or "aten"), base)
        return [getattr(packet, o) for o in ([overload] if overload else packet.overloads())]
    except AttributeError:
        fail(
            RuleError,
            call=f"rule({name!r}, ...)",
            got=repr(name),
            number=f"torch has no operator {name!r}",
            rule="a rule is for an operator of the torch.ops namespace",
            fix='"namespace::operator" as given to torch.library, or the name of an aten operator such as "mm"',
        )


def register(names: str, rule: Rule) -> None:
    """Registers `rule` for all operators named, separated by blanks; those that write to an operand are left out."""
    for name in names.split():
        for op in overloads(name):
            if not op._schema.is_mutable:
                RULES[op] = rule


def rule(
    op: str,
    pattern: str,
    *,
    linear: str = "",
    decompose: Callable[..., Any] | None = None,
) -> None:
    """Registers how an operator behaves under sharding, as a pattern of factors.

    Args:
        op: such as `"mylib::scale"`, or the name of an aten operator.
        pattern: dims of the tensor operands, `->`, dims of the results; operands and results separated by commas. A
            name that several share is one factor: split in one, it is split in all. A name absent from the results
            is summed over. `...` stands for leading dims, aligned at the right as in broadcasting. `!d`: whole, this
            factor can't be split. `(h k)`: one dim made up of two factors, major first.
        linear: numbers of the operands in which the operator is linear: `"0|1"` in each alone (a product), `"0,1"`
            jointly (a sum). A pending sum passes through those; by default the operator is nonlinear.
        decompose: the operator in terms of simpler ones, used where a whole factor is split.

    Raises:
        RuleError: an operator that does not exist, or a pattern that is not well formed.

    >>> rule("mm", "m k, k n -> m n", linear="0|1")
    """
    register(op, Rule(parse(pattern, linear), decompose, text=pattern))


_TOKEN = re.compile(r"\.\.\.|!?[A-Za-z_]\w*|\([^()]*\)|\S+")
_NAME = re.compile(r"!?[A-Za-z_]\w*$")


def _tokens(side: str, pattern: str) -> list[list[str]]:
    out = []
    for operand in side.split(","):
        tokens = _TOKEN.findall(operand)
        for t in tokens:
            names = t[1:-1].split() if t.startswith("(") else [t]
            bad = [n for n in names if n != "..." and not _NAME.match(n)]
            if bad or not names:
                fail(
                    RuleError,
                    call=f"rule pattern {pattern!r}",
                    got=f"operand {operand.strip()!r}",
                    number=f"{(bad or [t])[0]!r} is not a factor",
                    rule="a dim is a name, !name (whole), (a b) (made up of factors), or ... (leading dims)",
                    fix='for example "... m k, ... k n -> ... m n"',
                )
        out.append(tokens)
    return out


def parse(pattern: str, linear: str = "") -> Callable[[OpCall], Sharding]:
    """Turns a pattern into the function from a call to its factors."""
    if pattern.count("->") != 1:
        fail(
            RuleError,
            call=f"rule pattern {pattern!r}",
            got=pattern,
            number=f"{pattern.count('->')} arrows",
            rule="a pattern is operands -> results",
            fix='for example "b s, s -> b s"',
        )
    left, right = (_tokens(side, pattern) for side in pattern.split("->"))
    groups = [[i.strip() for i in group.split(",")] for group in linear.split("|") if group.strip()]
    wrong = [i for group in groups for i in group if not i.isdigit() or int(i) >= len(left)]
    if wrong:
        fail(
            RuleError,
            call=f"rule pattern {pattern!r}",
            got=f"linear={linear!r}",
            number=f"{wrong[0]!r} is not the number of an operand",
            rule=f"the operands are numbered 0 to {len(left) - 1}; `|` parts sets of them, `,` the members of a set",
            fix='linear="0|1" for a product, linear="0,1" for a sum',
        )
    sets = tuple(frozenset(int(i) for i in group) for group in groups)

    def shard(call: OpCall) -> Sharding:
        if len(call.operands) != len(left) or len(call.outs) != len(right):
            fail(
                RuleError,
                call=f"rule pattern {pattern!r} for {call.target}",
                got=f"{len(call.operands)} operands and {len(call.outs)} results",
                number=f"the pattern has {len(left)} operands and {len(right)} results",
                rule="a pattern names every tensor operand and every result",
                fix="write a pattern for this call, or leave the optional operand out",
            )
        sizes: dict[str, int] = {}
        whole: set[str] = set()
        leads = (len(o.shape) - (len(t) - 1) for t, o in zip(left, call.operands, strict=True) if "..." in t)
        longest = max(leads, default=0)

        def dims(tokens: list[str], operand: Operand) -> Factors:
            names: list[list[str]] = []
            for t in tokens:
                if t == "...":
                    lead = len(operand.shape) - (len(tokens) - 1)
                    names += [[f"...{longest - lead + i}"] for i in range(lead)]
                else:
                    names.append(t[1:-1].split() if t.startswith("(") else [t])
            if len(names) != len(operand.shape):
                fail(
                    RuleError,
                    call=f"rule pattern {pattern!r} for {call.target}",
                    got=f"an operand of shape {list(operand.shape)}",
                    number=f"{len(names)} dims in the pattern, {len(operand.shape)} in the operand",
                    rule="a pattern names every dim",
                    fix="begin the operand with ... if it may have further leading dims",
                )
            out: list[Dim] = []
            for group, n in zip(names, operand.shape, strict=True):
                whole.update(g[1:] for g in group if g.startswith("!"))
                group = [g.removeprefix("!") for g in group]
                if len(group) == 1:
                    known = sizes.get(group[0], 1)
                    # A dim of size 1 against a larger one is broadcast: it has no part in the factor.
                    if n == 1 and known != 1:
                        out.append(())
                        continue
                    sizes[group[0]] = n
                out.append(tuple(group))
            return tuple(out)

        # Twice: sizes known only from a later operand decide which dims of an earlier one are broadcast.
        for _ in range(2):
            operands = tuple(dims(t, o) for t, o in zip(left, call.operands, strict=True))
            results = tuple(dims(t, o) for t, o in zip(right, call.outs, strict=True))
        _compound_sizes(operands + results, call.operands + call.outs, sizes)
        return Sharding(operands, results, sizes, frozenset(whole), sets)

    return shard


def _compound_sizes(factors: Sequence[Factors], operands: Sequence[Operand], sizes: dict[str, int]) -> None:
    for dims, operand in zip(factors, operands, strict=True):
        for group, n in zip(dims, operand.shape, strict=True):
            unknown = [g for g in group if g not in sizes]
            if len(group) > 1 and len(unknown) == 1:
                known = 1
                for g in group:
                    known *= sizes.get(g, 1)
                sizes[unknown[0]] = n // max(known, 1)


class Conflict(Exception):
    """Why the operands of an operator do not fit together; the caller makes a message of it.

    Args:
        kind: `axis` (one axis, two factors), `order` (one factor, two orders of axes), `whole`, `divide`, `merge`.
        axis: the mesh axis at fault.
        operands: numbers of the operands at fault.
        detail: one clause with the numbers.
    """

    def __init__(self, kind: str, axis: str, operands: list[int], detail: str, factor: str = ""):
        super().__init__(detail)
        self.kind, self.axis, self.operands, self.detail, self.factor = kind, axis, operands, detail, factor


@dataclasses.dataclass(frozen=True)
class Solution:
    """What an operator call needs and gives: the types its operands must be converted to, and those of its results."""

    targets: tuple[Type, ...]
    results: tuple[Type, ...]
    factor_axes: Mapping[str, tuple[str, ...]]


def split_factors(dim: Dim, axes: tuple[str, ...], sizes: Mapping[str, int], mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Which factor of a dim each of the axes splits: the major one first, as long as it divides."""
    if not axes:
        return {}
    if len(dim) == 1:
        return {dim[0]: axes}
    out: dict[str, tuple[str, ...]] = {}
    rest = list(axes)
    for f in dim:
        left = sizes[f]
        while rest and left > 1 and left % mesh[rest[0]] == 0:
            left //= mesh[rest[0]]
            out[f] = (*out.get(f, ()), rest.pop(0))
        if left > 1:
            break
    if rest:
        raise Conflict("divide", rest[0], [], f"a dim of factors {[sizes[f] for f in dim]} over {mesh[rest[0]]} ranks")
    return out


def solve(s: Sharding, types: Sequence[Type], mesh: Mesh) -> Solution:
    """Decides for one operator how every operand must be split and how its results are.

    For each mesh axis at most one factor is split. An operand that has the factor whole takes its own part; one
    without the factor becomes R; a factor that is absent from the results leaves them partial. A pending sum passes
    through what is linear in it and is resolved otherwise.

    Raises:
        Conflict: the operands do not fit together.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    holder: dict[str, int] = {}
    live = [i for i in range(len(types)) if i not in s.ignored]
    for i in live:
        for dim, axes in zip(s.operands[i], types[i].dims, strict=True):
            if not axes:
                continue
            if not dim:
                raise Conflict("whole", axes[0], [i], "a dim of size 1 is split and broadcast")
            try:
                per_factor = split_factors(dim, axes, s.sizes, mesh)
            except Conflict as c:
                c.operands.append(i)
                raise
            for f, mine in per_factor.items():
                if f in s.whole:
                    raise Conflict("whole", mine[0], [i], f"factor {f!r} (size {s.sizes[f]}) is split by {mine}", f)
                old = chosen.get(f, ())
                short, long = sorted((old, mine), key=len)
                if long[: len(short)] != short:
                    raise Conflict("order", mine[0], [holder[f], i], f"factor {f!r} is split by {old} and by {mine}")
                if len(mine) > len(old):
                    chosen[f], holder[f] = mine, i
    for i in s.ignored:
        used = {a for axes in chosen.values() for a in axes}
        for dim, axes in zip(s.operands[i], types[i].dims, strict=True):
            follows = len(dim) == 1 and dim[0] not in chosen and dim[0] not in s.whole and not used & set(axes)
            if axes and follows and not (dim[0] in s.even and s.sizes[dim[0]] % mesh.count(axes)):
                chosen[dim[0]], holder[dim[0]] = axes, i
    of_axis: dict[str, str] = {}
    for f, axes in chosen.items():
        for a in axes:
            if a in of_axis:
                g = of_axis[a]
                raise Conflict("axis", a, [holder[g], holder[f]], f"axis {a!r} splits factors {g!r} and {f!r}")
            of_axis[a] = f
        if f in s.even and s.sizes[f] % mesh.count(axes):
            raise Conflict("divide", axes[0], [holder[f]], f"size {s.sizes[f]} over {mesh.count(axes)} ranks")

    def dims_of(factors: Factors, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        out = []
        for dim in factors:
            axes: tuple[str, ...] = ()
            for k, f in enumerate(dim):
                mine = chosen.get(f, ())
                if mine and any(s.sizes[g] != mesh.count(chosen.get(g, ())) for g in dim[:k]):
                    raise Conflict("merge", mine[0], [holder[f]], f"factor {f!r} is split but is not major in its dim")
                if len(dim) > 1 and s.sizes[f] % mesh.count(mine):
                    raise Conflict("divide", mine[0], [holder[f]], f"size {s.sizes[f]} over {mesh.count(mine)} ranks")
                axes += mine
            out.append(axes)
        return tuple(out)

    targets = [dims_of(s.operands[i], types[i].shape) if i in live else types[i].dims for i in range(len(types))]
    outs = [dims_of(r, ()) for r in s.results]
    varies: set[str] = set(of_axis)
    passing: dict[str, frozenset[int]] = {}
    for axis in mesh.axes:
        if axis in of_axis:
            continue
        pending = frozenset(i for i in live if axis in types[i].partial)
        if pending:
            fits = [g for g in s.linear if pending == g or (s.spread and pending <= g)]
            # A pending sum in one operand of a product is a factor of all ranks: one that passes must be alone.
            if fits:
                passing[axis] = fits[0]
                varies.add(axis)
                continue
        if any(axis in types[i].replicated for i in live):
            varies.add(axis)

    final = []
    for i, t in enumerate(types):
        if i in s.ignored:
            final.append(t)
            continue
        split = {a for d in targets[i] for a in d}
        partial = frozenset(a for a, g in passing.items() if i in g)
        replicated = frozenset(varies) - split - partial
        final.append(t.with_(dims=targets[i], partial=partial, replicated=replicated))
    reduced_sum = {
        a
        for f, axes in chosen.items()
        for a in axes
        if not any(f in dim for r in s.results for dim in r) and s.reduced.get(f, "sum") == "sum"
    }
    reduced_other = {
        a
        for f, axes in chosen.items()
        for a in axes
        if not any(f in dim for r in s.results for dim in r) and s.reduced.get(f, "sum") != "sum"
    }
    results = []
    for dims in outs:
        split = {a for d in dims for a in d}
        partial = frozenset(reduced_sum | set(passing))
        replicated = frozenset(varies) - split - partial - reduced_other
        results.append((dims, partial, replicated))
    return Solution(
        tuple(final),
        tuple(Type(torch.float32, (), d, p, r) for d, p, r in results),
        chosen,
    )


@dataclasses.dataclass(frozen=True)
class Local:
    """What a lowering knows while it computes one rank's part."""

    call: OpCall
    sharding: Sharding
    solution: Solution
    mesh: Mesh
    results: tuple[Type, ...]

    def axes(self, factor: str) -> tuple[str, ...]:
        """The axes that split a factor."""
        return self.solution.factor_axes.get(factor, ())

    def positions(self, factor: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Global index of each local element of a factor, int64[local size], and which of them are not padding."""
        from ..collectives import axis_index

        n, axes = self.sharding.sizes[factor], self.axes(factor)
        sizes = [n]
        for a in axes:
            sizes.append(local_size(sizes[-1], (a,), self.mesh))
        at = torch.arange(sizes[-1], device=device)
        true = torch.ones(sizes[-1], dtype=torch.bool, device=device)
        for k in range(len(axes) - 1, -1, -1):
            at = at + axis_index((axes[k],), self.mesh[axes[k]], device) * sizes[k + 1]
            true = true & (at < sizes[k])
        return at, true

    def filled(self, operand: int, x: torch.Tensor, value: float) -> torch.Tensor:
        """An operand with its padding, in all dims that are one factor, set to a value."""
        for d, dim in enumerate(self.sharding.operands[operand]):
            if len(dim) != 1 or self.sharding.sizes[dim[0]] % self.mesh.count(self.axes(dim[0])) == 0:
                continue
            _, true = self.positions(dim[0], x.device)
            x = torch.where(true.view([-1 if i == d else 1 for i in range(x.ndim)]), x, value)
        return x

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The operator itself on local operands."""
        if self.sharding.run is not None:
            return self.sharding.run(self, tensors)
        args, kwargs = self.call.args, dict(self.call.kwargs)
        if self.sharding.rewrite is not None:
            args, kwargs = self.sharding.rewrite(args, kwargs, [t.local_shape(self.mesh) for t in self.results])
        return self.call.target(*fill(args, tensors), **fill(kwargs, tensors))


def fill(x: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Puts tensors in the place of `Operand`s."""
    if isinstance(x, Operand):
        return tensors[x.index]
    if isinstance(x, (list, tuple)):
        return type(x)(fill(y, tensors) for y in x)
    if isinstance(x, dict):
        return {k: fill(v, tensors) for k, v in x.items()}
    return x
