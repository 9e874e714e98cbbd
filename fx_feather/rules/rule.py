"""Rules: how one operator behaves under sharding, as a pattern of factors, and the one algorithm that reads them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import RuleError, fail

Dim = tuple[str, ...]
Factors = tuple[Dim, ...]


@dataclasses.dataclass(frozen=True)
class Operand:
    """Stands for the i-th tensor operand in the arguments of an operator call.

    `counts` is the dim along which its values are 0, 1, 2, …, if they are and it has no other dim but of size 1.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    counts: int | None = None

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
        decomposed_for: kinds of conflict (see `solve.Conflict`) that the decomposition settles.
        advice: another way out than a `constrain`, where a factor must be whole and is split; for messages.
        vjp: from cotangents, results and the operator's own arguments, all local, to a gradient for each tensor among
            these; None where torch can differentiate the operator.
    """

    shard: Callable[[OpCall], Sharding]
    decompose: Callable[..., Any] | None = None
    text: str = ""
    decomposed_for: frozenset[str] = frozenset({"whole"})
    advice: str = ""
    vjp: Callable[..., Any] | None = None


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
