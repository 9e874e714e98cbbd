"""The arithmetic of optimizers, leaf by leaf: each function is a block, traced once for all leaves that are alike."""

import functools as ft
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fx_feather import kernels as kernels  # defines an operator that is used below
from fx_feather.trace import block, constrain

_Leaf = TypeVar("_Leaf", bound=Callable[..., Any])


def bounded(fn: _Leaf) -> _Leaf:
    """Marks what gives finite values for finite values and numbers of moderate size, at any of them.

    An update made of such blocks alone may write over the old values at once: any other is tried first, beside them.
    """
    fn.bounded = True  # type: ignore[attr-defined]
    return fn


# Scalars that depend on the step come as 0-dim float64 tensors. They are rounded to the leaf's dtype before they meet
# it: a leaf without dims would be widened by them, and one with dims would be read through a slow conversion.


@bounded
def adam_leaf(
    grad: Tensor, mu: Tensor, nu: Tensor, correct1: Tensor, correct2: Tensor, b1: float, b2: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's direction, and the new moments; Kingma and Ba, algorithm 1, in the order of the end of its section 2.

    The two corrections are scalars: taken together first, they cost no pass over the leaf.
    """
    grad = grad.to(mu.dtype)
    mu = torch.lerp(mu, grad, 1 - b1)
    nu = torch.addcmul(nu * b2, grad, grad, value=1 - b2)
    scale, floor = (correct1 / correct2.sqrt()).to(mu.dtype), (eps * correct1).to(mu.dtype)
    return mu / (nu.sqrt() * scale + floor), mu, nu


@bounded
def adamw_leaf(
    grad: Tensor,
    mu: Tensor,
    nu: Tensor,
    param: Tensor,
    lr: Tensor,
    correct1: Tensor,
    correct2: Tensor,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW's update, and the new moments; Loshchilov and Hutter, algorithm 2, decay scaled by the learning rate."""
    direction, mu, nu = adam_leaf(grad, mu, nu, correct1, correct2, b1, b2, eps)
    return scale_leaf(decay_leaf(direction, param, decay), -lr), mu, nu


@bounded
def adamw_step_leaf(
    grad: Tensor,
    factor: Tensor,
    mu: Tensor,
    nu: Tensor,
    param: Tensor,
    lr: Tensor,
    step: Tensor,
    decay: float,
    *,
    b1: float,
    b2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The parameter after AdamW's update, and the new moments.

    The gradient is `factor` times `grad`; `step` is the number of this update, float32[].
    """
    grad = grad.to(mu.dtype)
    factor = factor.to(mu.dtype)
    if param.dtype == mu.dtype:
        # The last result, the gradient times the factor, is nobody's: it lies where the gradient lay.
        new, mu, nu, _ = torch.ops.fx_feather.adamw(param, grad, factor, mu, nu, lr, step, b1, b2, eps, decay)
        return new, mu, nu
    # The kernel has one dtype for all; a narrow parameter is widened, and rounded once.
    grad = grad * factor
    update, mu, nu = adamw_leaf(grad, mu, nu, param, lr, *corrections(step, b1, b2), b1, b2, eps, decay)
    return apply_leaf(param, update), mu, nu


def corrections(step: Tensor, b1: float, b2: float) -> tuple[Tensor, Tensor]:
    """What the moments after update number `step` must be divided by, since they started at zero; float64[] each."""
    t = step.to(torch.float64)
    return 1 - torch.pow(b1, t), 1 - torch.pow(b2, t)


@bounded
def decay_leaf(update: Tensor, param: Tensor, decay: float) -> Tensor:
    """Adds the gradient of `decay / 2` times the squared parameter."""
    return torch.add(update, param.to(update.dtype), alpha=decay) if decay else update


@bounded
def momentum_leaf(grad: Tensor, velocity: Tensor, momentum: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """The direction and the new velocity; with Nesterov's, one step ahead (Sutskever et al. 2013, as in torch)."""
    grad = grad.to(velocity.dtype)
    velocity = momentum * velocity + grad
    return (grad + momentum * velocity if nesterov else velocity), velocity


@bounded
def sgd_leaf(
    grad: Tensor, velocity: Tensor, param: Tensor, lr: Tensor, momentum: float, nesterov: bool, decay: float
) -> tuple[Tensor, Tensor]:
    """The update and the new velocity of SGD with momentum."""
    direction, velocity = momentum_leaf(decay_leaf(wide(grad), param, decay), velocity, momentum, nesterov)
    return scale_leaf(direction, -lr), velocity


@bounded
def plain_sgd_leaf(grad: Tensor, param: Tensor, lr: Tensor, decay: float) -> Tensor:
    """The update of SGD without momentum."""
    return scale_leaf(decay_leaf(wide(grad), param, decay), -lr)


@bounded
def lion_leaf(
    grad: Tensor, mu: Tensor, param: Tensor, lr: Tensor, b1: float, b2: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Lion's update and the new momentum; Chen et al. 2023, algorithm 2."""
    grad = grad.to(mu.dtype)
    direction = torch.sign(torch.lerp(grad, mu, b1))
    return scale_leaf(decay_leaf(direction, param, decay), -lr), torch.lerp(grad, mu, b2)


@bounded
def muon_leaf(
    grad: Tensor,
    velocity: Tensor,
    param: Tensor,
    lr: Tensor,
    momentum: float,
    nesterov: bool,
    decay: float,
    steps: int,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Muon's update and the new velocity."""
    grad = grad.to(velocity.dtype)
    velocity = torch.lerp(grad, velocity, momentum)
    direction = torch.lerp(grad, velocity, momentum) if nesterov else velocity
    # Products of a split matrix with itself would need it whole twice, or sums of each: it is gathered once.
    direction = orthogonal(constrain(direction, "_ _"), steps, eps) * scale
    return scale_leaf(decay_leaf(direction, param, decay), -lr), velocity


def orthogonal(x: Tensor, steps: int, eps: float) -> Tensor:
    """A matrix with the singular vectors of `x`, its singular values near 1; Jordan et al. 2024."""
    a, b, c = 3.4445, -4.775, 2.0315
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.mT  # the products are then of the smaller side
    x = x / torch.linalg.vector_norm(x).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if wide else x.mT


@bounded
def average_leaf(mean: Tensor, param: Tensor, decay: float) -> Tensor:
    """A moving average after one more value."""
    return torch.lerp(param.to(mean.dtype), mean, decay)


@bounded
def copy_leaf(param: Tensor) -> Tensor:
    """A parameter's value as the start of a statistic, in float32 or wider."""
    return param.to(wide_dtype(param.dtype), copy=True)


@bounded
def scale_leaf(update: Tensor, factor: Tensor | float) -> Tensor:
    """A multiple of an update, in its own dtype."""
    if isinstance(factor, Tensor):
        factor = factor.to(wide_dtype(update.dtype))
    return (update * factor).to(update.dtype)


def zeros_leaf(param: Tensor) -> Tensor:
    """A statistic at the start: like the parameter, in float32 or wider."""
    return torch.zeros_like(param, dtype=wide_dtype(param.dtype))


@bounded
def apply_leaf(param: Tensor, update: Tensor) -> Tensor:
    """Adds in the wider of the two dtypes, and rounds once."""
    wide = torch.promote_types(param.dtype, update.dtype)
    return (param.to(wide) + update.to(wide)).to(param.dtype)


def sum_squares_leaf(x: Tensor, factor: Tensor | None = None) -> Tensor:
    """The sum of squares of a factor times a leaf."""
    if factor is not None:
        return torch.ops.fx_feather.sum_squares(x, factor)
    x = wide(x)  # in operators that have a gradient: a loss may hold a norm
    return (x * x).sum()


def max_abs_leaf(x: Tensor) -> Tensor:
    """The largest absolute value of a leaf."""
    return wide(x).abs().amax()


@bounded
def finite_leaf(x: Tensor, what: str) -> Tensor:
    """The number itself, which must be finite for the step to go on."""
    return torch.ops.fx_feather.finite(x, what)


def total_leaf(*parts: Tensor) -> Tensor:
    """The sum of some 0-dim tensors, in the widest of their dtypes."""
    return _stacked(parts).sum()


def root_of_sum_leaf(*parts: Tensor) -> Tensor:
    """The root of a sum of 0-dim tensors, in the widest of their dtypes."""
    return _stacked(parts).sum().sqrt()


def largest_leaf(*parts: Tensor) -> Tensor:
    """The largest of some 0-dim tensors, in the widest of their dtypes."""
    return _stacked(parts).amax()


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    dtype = widest(p.dtype for p in parts)
    return torch.stack([p.to(dtype) for p in parts])


adam = block(adam_leaf, name="adam")
adamw = block(adamw_leaf, name="adamw")
decayed = block(decay_leaf, name="decay")
with_momentum = block(momentum_leaf, name="momentum")
sgd = block(sgd_leaf, name="sgd")
plain_sgd = block(plain_sgd_leaf, name="sgd")
lion = block(lion_leaf, name="lion")
muon = block(muon_leaf, name="muon")
moved_average = block(average_leaf, name="ema")
copied = block(copy_leaf, name="copy")
scaled = block(scale_leaf, name="scale")
zeros = block(zeros_leaf, name="zeros")
applied = block(apply_leaf, name="apply_updates")
sum_squares = block(sum_squares_leaf, name="sum_squares")
max_abs = block(max_abs_leaf, name="max_abs")
finite = block(finite_leaf, name="finite")
total = block(total_leaf, name="total")
root_of_sum = block(root_of_sum_leaf, name="root_of_sum")
largest = block(largest_leaf, name="largest")


@ft.cache
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics of a leaf: float32, or wider if the leaf is."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """A leaf in the dtype of its statistics."""
    return x.to(wide_dtype(x.dtype))


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The widest of some dtypes, at least float32."""
    return ft.reduce(torch.promote_types, set(dtypes), torch.float32)
