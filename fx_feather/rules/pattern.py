"""Patterns: a rule written as factors of dims, such as `... m k, ... k n -> ... m n`."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import RuleError, fail
from .rule import Dim, Factors, OpCall, Operand, Rule, Sharding, register


def rule(
    op: str,
    pattern: str,
    *,
    linear: str = "",
    decompose: Callable[..., Any] | None = None,
    vjp: Callable[..., Any] | None = None,
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
        vjp: the handwritten backward of an operator that torch.func can't differentiate, such as one of
            torch.library.custom_op: `vjp(ct, result, *args, **kwargs)` gives a gradient for each tensor among the
            operator's own arguments, None for none. `ct` and `result` are tuples where it has several results. It
            works on local values, and sums over no ranks: the pattern says what is still owed. A compiled function
            and `value_and_grad` use it; for a plain `backward()` torch has `torch.library.register_autograd`.

    Raises:
        RuleError: an operator that does not exist, or a pattern that is not well formed.

    >>> rule("mm", "m k, k n -> m n", linear="0|1")
    """
    register(op, Rule(parse(pattern, linear), decompose, text=pattern, vjp=vjp))


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
