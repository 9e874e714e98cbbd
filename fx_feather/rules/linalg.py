"""Rules of operators on matrices: the last two dims are the matrix, the others are a batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .handwritten import call_operator
from .local import Local, fill
from .pointwise import named, sets, sizes_of
from .rule import Factors, OpCall, Operand, Rule, Sharding, register


def _harmless(*matrices: int) -> Callable[[Local, list[Tensor]], Any]:
    """The local call, with a matrix in the place of padding that has an inverse, a root and no eigenvalue twice."""

    def run(local: Local, operands: list[Tensor]) -> Any:
        safe = list(operands)
        for i in matrices:
            x = safe[i]
            other = torch.eye(*x.shape[-2:], dtype=x.dtype, device=x.device)
            other = other * torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
            safe[i] = local.filled(i, x - other, 0.0) + other
        return call_operator(local.call.target, fill(local.call.args, safe), fill(dict(local.call.kwargs), safe), "")

    return run


def _batch(o: Operand, lead: tuple[int, ...], factors: Factors, own: int) -> Factors:
    """The factors of an operand whose last `own` dims are its own, and whose others are broadcast to `lead`."""
    n = o.ndim - own
    shared = zip(factors[len(lead) - n :], lead[len(lead) - n :], o.shape[:n], strict=True)
    return (*(f if size == m else () for f, size, m in shared), *((f"m{o.index}_{k}",) for k in range(own)))


def _of_matrices(call: OpCall) -> Sharding:
    x, *rest = call.operands
    lead = x.shape[:-2]
    factors = named(lead)
    operands = (_batch(x, lead, factors, 2), *(tuple((f"m{o.index}_{k}",) for k in range(o.ndim)) for o in rest))
    sizes = sizes_of(*((f, o.shape) for f, o in zip(operands, call.operands, strict=True)))
    results = tuple((*factors, *((),) * (o.ndim - len(lead))) for o in call.outs)
    whole = frozenset(f for f in sizes if f.startswith("m"))
    return Sharding(operands, results, sizes, whole=whole, run=_harmless(0))


_NAMES = (
    "linalg_det linalg_slogdet linalg_inv linalg_cholesky linalg_eigh linalg_eigvalsh linalg_qr linalg_svd "
    "linalg_svdvals linalg_matrix_exp linalg_matrix_power det slogdet logdet inverse cholesky matrix_exp matrix_power"
)
for _name in (*(f"{name}.default" for name in _NAMES.split()), "linalg_pinv.atol_rtol_tensor", "linalg_pinv.default"):
    register(_name, Rule(_of_matrices, text="... !n !m -> ..."))


def _solve(call: OpCall) -> Sharding:
    a, b = call.operands
    lead = call.outs[0].shape
    # As torch has it: a batch of vectors, if they fit the matrices, or matrices.
    own = 1 if b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1]) else 2
    lead = lead[: len(lead) - own]
    factors = named(lead)
    operands = (_batch(a, lead, factors, 2), _batch(b, lead, factors, own))
    sizes = {**sizes_of((factors, lead)), **sizes_of(*((f, o.shape) for f, o in zip(operands, (a, b), strict=True)))}
    whole = frozenset(f for f in sizes if f.startswith("m"))
    return Sharding(operands, ((*factors, *((),) * own),), sizes, whole=whole, linear=sets([b]), run=_harmless(0))


register("linalg_solve.default", Rule(_solve, text="... !n !n, ... !n !k -> ... n k"))


def _cross(call: OpCall) -> Sharding:
    shape = tuple(torch.broadcast_shapes(*(o.shape for o in call.operands)))
    dim = call.arg(2, "dim", -1 if "linalg" in str(call.target) else None)
    at = shape.index(3) if dim is None else dim % len(shape)
    factors = named(shape)
    operands = tuple(_batch(o, shape, factors, 0) for o in call.operands)
    a, b = call.operands

    def run(local: Local, tensors: list[Tensor]) -> Tensor:
        # By number: without one it is the first dim of size 3, which a part may have elsewhere.
        return torch.linalg.cross(*torch.broadcast_tensors(*tensors), dim=at)

    whole = frozenset({f"d{at}"})
    return Sharding(
        operands, (factors,), sizes_of((factors, shape)), whole=whole, linear=sets([a], [b]), run=run
    )  # fmt: skip


register("linalg_cross.default cross.default", Rule(_cross, text="... !d, ... !d -> ... d"))


def _bilinear(call: OpCall) -> Sharding:
    a, b, weight, *bias = call.operands
    lead = named(a.shape[:-1])
    operands: list[Factors] = [(*lead, ("i",)), (*lead, ("j",)), (("o",), ("i",), ("j",))]
    operands += [(("o",),)] * len(bias)
    sizes = sizes_of(*((f, o.shape) for f, o in zip(operands, call.operands, strict=True)))
    if bias:
        return Sharding(tuple(operands), ((*lead, ("o",)),), sizes, whole=frozenset({"i", "j"}))
    return Sharding(tuple(operands), ((*lead, ("o",)),), sizes, linear=sets([a], [b], [weight]))


register("bilinear.default", Rule(_bilinear, text="... i, ... j, o i j -> ... o"))
