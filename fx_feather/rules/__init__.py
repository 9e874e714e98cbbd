"""The sharding rules of all operators, a file a family; importing this registers them."""

import functools as ft

from . import attention as _attention
from . import batched as _batched
from . import cut as _cut
from . import experts as _experts
from . import image as _image
from . import index as _index
from . import linalg as _linalg
from . import loss as _loss
from . import matmul as _matmul
from . import norm as _norm
from . import random as _random
from . import reduce as _reduce
from . import running as _running
from . import view as _view
from . import write as _write
from .handwritten import Handwritten as Handwritten
from .handwritten import by_hand as by_hand
from .handwritten import call_operator as call_operator
from .local import Local as Local
from .pattern import rule as rule
from .pointwise import is_pointwise as _is_pointwise
from .pointwise import pointwise as _pointwise
from .rule import RULES as RULES
from .rule import OpCall as OpCall
from .rule import Operand as Operand
from .rule import Rule as Rule
from .rule import Sharding as Sharding
from .solve import Conflict as Conflict
from .solve import Solution as Solution
from .solve import solve as solve

FAMILIES = (
    _attention,
    _batched,
    _cut,
    _experts,
    _image,
    _index,
    _linalg,
    _loss,
    _matmul,
    _norm,
    _random,
    _reduce,
    _running,
    _view,
    _write,
)


_pointwise_rule = ft.cache(_pointwise)


def lookup(call: OpCall) -> Rule | None:
    """The rule of an operator: the registered one, or the pointwise rule if torch says that it is pointwise."""
    found = RULES.get(call.target)
    return _pointwise_rule(call.target) if found is None and _is_pointwise(call.target) else found
