"""A number that a Python function computes from the number of a step, as an operator of a program."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: By name: what a function was made of, and the function.
_functions: dict[str, tuple[Any, Callable[[int], float]]] = {}


def named(name: str, fn: Callable[[int], float], source: Any = None) -> str:
    """Keeps a function for `scheduled`, under a name like the one given; programs hold the name for good.

    Ranks compare their programs, and so these names: a function of the same `source` gets the same one, however often
    a rank asks.

    >>> named("double", lambda k: 2.0 * k)
    'double'
    >>> scheduled(torch.tensor(3), "double")
    tensor(6., dtype=torch.float64)
    """
    names = (name if i == 0 else f"{name}, another {i}" for i in itertools.count())
    source = fn if source is None else source
    free = next(n for n in names if n not in _functions or _functions[n][0] is source)
    _functions[free] = (source, fn)
    return free


def scheduled(step: Tensor, name: str) -> Tensor:
    """What the function that is kept under a name gives for a step.

    It runs on the host, each time the program does: a step on another device is waited for.

    Args:
        step: int64[], updates done so far.
        name: from `named`.

    Returns:
        float64[], on the device of `step`.

    >>> scheduled(torch.tensor(3), named("half", lambda k: k / 2))
    tensor(1.5000, dtype=torch.float64)
    """
    return torch.full((), _functions[name][1](int(step)), dtype=torch.float64, device=step.device)


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("scheduled(Tensor step, str name) -> Tensor")
_library.impl("scheduled", scheduled, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fx_feather::scheduled", lambda step, name: step.new_empty((), dtype=torch.float64), lib=_library
)
