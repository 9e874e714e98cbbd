"""A number that must be finite for a program to go on."""

import math

import torch
from torch import Tensor

from ..errors import NonFiniteError, fail


def finite(x: Tensor, what: str) -> Tensor:
    """The number itself, or an error; on another device than the CPU it is waited for.

    Args:
        x: float[].
        what: which number it is.

    Raises:
        NonFiniteError: it is NaN or infinite.

    >>> finite(torch.tensor(2.0), "a norm")
    tensor(2.)
    """
    number = x.item()
    if not math.isfinite(number):
        fail(
            NonFiniteError,
            call=what,
            got=repr(number),
            number=f"{number!r} is not finite",
            rule="all updates are multiplied by a quotient of it: they would be lost, or spoil every parameter",
            fix="the state is unchanged: look at the transform before it in the chain, whose updates are not finite",
        )
    return x.clone()


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("finite(Tensor x, str what) -> Tensor")
_library.impl("finite", finite, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::finite", lambda x, what: x.new_empty(()), lib=_library)
