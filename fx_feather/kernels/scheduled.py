"""A number that a Python function computes from the number of a step, as an operator of a program."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

_functions: dict[str, Callable[[int], float]] = {}


def named(name: str, fn: Callable[[int], float]) -> str:
    """Keeps a function for `scheduled`, under a name like the one given; programs hold the name for good.

    >>> named("double", lambda k: 2.0 * k)
    'double'
    >>> scheduled(torch.tensor(3), "double")
    tensor(6., dtype=torch.float64)
    """
    names = (name if i == 0 else f"{name}, another {i}" for i in itertools.count())
    free = next(n for n in names if _functions.get(n, fn) is fn)
    _functions[free] = fn
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
    return torch.full((), _functions[name](int(step)), dtype=torch.float64, device=step.device)


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("scheduled(Tensor step, str name) -> Tensor")
_library.impl("scheduled", scheduled, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fx_feather::scheduled", lambda step, name: step.new_empty((), dtype=torch.float64), lib=_library
)
