"""Constants: tensors from outside that a traced function reads, taken as they are when it is compiled."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .errors import FeatherError, message, raise_all
from .source import user_line
from .spec import Type
from .unit import Unit

#: Each rank holds a constant whole, so that a large one is better an argument, which a layout can split.
CONSTANT_BYTES = 1 << 26

#: Tensors from outside by their identity, kept alive, with the copies that programs hold.
Frozen = dict[int, tuple[Tensor, Tensor]]


def freeze(unit: Unit, frozen: Frozen, given: frozenset[int] = frozenset(), what: str = "") -> None:
    """Puts copies in the place of the tensors from outside that a unit reads: what is written later is not seen.

    Args:
        unit: as traced.
        frozen: copies made so far, so that a tensor has one.
        given: identities of tensors that are arguments.
        what: the function, for messages.

    Raises:
        FeatherError: a tensor whose gradient would be lost, one without values, one that is no plain tensor, or one of
            more than `CONSTANT_BYTES`.
    """
    problems = []
    for n in unit.graph.find_nodes(op="get_attr"):
        x = unit.constants[n.target]
        if id(x) in given or id(x) in {id(copy) for _, copy in frozen.values()}:
            continue
        if id(x) not in frozen:
            problem = _problem(x)
            if problem is not None:
                number, rule, fix = problem
                uses = [user_line(u) for u in n.users if u.op != "output"]
                problems.append(
                    message(
                        call=f"{what} at {uses[0]}" if uses else what,
                        got=f"a tensor from outside, {Type.whole(x)}",
                        number=number,
                        rule=rule,
                        fix=fix,
                    )
                )
                continue
            with torch.no_grad(), _disable_current_modes():
                frozen[id(x)] = (x, x.detach().clone())
        unit.constants[n.target] = frozen[id(x)][1]
    raise_all(FeatherError, list(dict.fromkeys(problems)))


def _problem(x: Any) -> tuple[str, str, str] | None:
    """What speaks against a tensor as a constant: the number, the rule and the fix of a message."""
    if isinstance(x, FakeTensor) or x.is_meta:
        return (
            "1 tensor of another trace is closed over",
            "whatever a block reads of what the function around it computes is an argument",
            "pass the tensor to the block as an argument",
        )
    if x.requires_grad:
        return (
            "1 gradient would be lost: the tensor requires one",
            "what has a gradient is a parameter; a tensor from outside is a constant",
            "a leaf of the template for it, or x.detach() where it is a constant",
        )
    if type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or x.layout != torch.strided or x._is_zerotensor():
        return (
            f"it is a {type(x).__name__} of layout {x.layout}",
            "a constant is a plain tensor, whose bytes are part of the program",
            "x.to_dense(), or a plain tensor that it is made of",
        )
    size = x.numel() * x.element_size()
    if size > CONSTANT_BYTES:
        return (
            f"{size:,} bytes are more than {CONSTANT_BYTES:,}",
            "every rank holds a constant whole, and it is part of the program that the ranks compare",
            "pass it in the parameters or the batch, where a layout can split it, or make it inside, as "
            "torch.arange(...) does",
        )
    return None
