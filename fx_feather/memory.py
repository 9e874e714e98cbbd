"""Memory of the values of a graph: where each lies as it was traced, and which operators write over it."""

from typing import Any

import torch
from torch import fx


def storage(n: Any) -> int | None:
    """What is equal for values that share memory; None where it is not known."""
    val = n.meta.get("val") if isinstance(n, fx.Node) else None
    return val.untyped_storage()._cdata if isinstance(val, torch.Tensor) else None


def writes(n: fx.Node) -> set[int | None]:
    """The memory that an operator writes over, as its schema says."""
    schema = getattr(n.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    found: set[int | None] = set()
    for k, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            given = n.args[k] if k < len(n.args) else n.kwargs.get(a.name)
            found |= {storage(x) for x in (given if isinstance(given, (list, tuple)) else [given])}
    return found - {None}
