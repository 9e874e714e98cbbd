"""Sample calls of every operator that has a rule: what the law of rules is checked on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fx_feather.kernels import named

aten = torch.ops.aten
feather = torch.ops.fx_feather


@dataclasses.dataclass(frozen=True)
class Arg:
    """A random tensor argument: floats (those of `constant` take no gradient), or whole numbers below `below`."""

    shape: tuple[int, ...]
    kind: str = "float"
    below: int = 2

    def make(self, g: torch.Generator) -> torch.Tensor:
        if self.kind == "float":
            return torch.randn(self.shape, generator=g, dtype=torch.float64)
        if self.kind == "complex":
            return torch.randn(self.shape, generator=g, dtype=torch.complex128)
        if self.kind in ("positive", "constant"):
            return torch.rand(self.shape, generator=g, dtype=torch.float64) * 0.8 + 0.1
        if self.kind == "definite":
            x = torch.randn(self.shape, generator=g, dtype=torch.float64)
            return x @ x.mT + torch.eye(self.shape[-1], dtype=torch.float64)
        numbers = torch.randint(0, self.below, self.shape, generator=g)
        return numbers.bool() if self.kind == "bool" else numbers


def f(*shape: int) -> Arg:
    return Arg(shape)


def p(*shape: int) -> Arg:
    return Arg(shape, "positive")


def i(below: int, *shape: int) -> Arg:
    return Arg(shape, "int", below)


def b(*shape: int) -> Arg:
    return Arg(shape, "bool")


def c(*shape: int) -> Arg:
    return Arg(shape, "constant")


def spd(*shape: int) -> Arg:
    return Arg(shape, "definite")


Sample = tuple[Callable[..., Any], list[Arg]]
SAMPLES: dict[str, list[Sample]] = {}


def add(name: str, *args: Any, **kwargs: Any) -> None:
    """One sample: an operator's arguments, with `Arg`s (also in lists) for tensors."""
    found: list[Arg] = []

    def collect(x: Any) -> Any:
        if isinstance(x, Arg):
            found.append(x)
            return ("tensor", len(found) - 1)
        return [collect(y) for y in x] if isinstance(x, list) else x

    spec = [collect(a) for a in args]
    namespace, _, rest = name.rpartition("::")
    base, overload = rest.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace or "aten"), base), overload)

    def fill(x: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        if isinstance(x, tuple) and x[:1] == ("tensor",):
            return tensors[x[1]]
        return [fill(y, tensors) for y in x] if isinstance(x, list) else x

    def call(*tensors: torch.Tensor) -> Any:
        return op(*(fill(a, tensors) for a in spec), **kwargs)

    SAMPLES.setdefault(f"{namespace or 'aten'}.{rest}", []).append((call, found))


# Pointwise: by tag, by name, linear and not.
for _name in [
    "neg",
    "exp",
    "sin",
    "cos",
    "silu",
    "sigmoid",
    "tanh",
    "relu",
    "gelu",
    "softplus",
    "abs",
    "erf",
    "square",
    "sgn",
    "floor",
]:
    add(f"{_name}.default", f(4, 5))
for _name in ["log", "sqrt", "rsqrt", "reciprocal", "log1p"]:
    add(f"{_name}.default", p(6, 5))
for _name in [
    "alias",
    "detach",
    "contiguous",
    "_to_copy",
    "negative",
    "real",
    "conj",
    "hardswish",
    "log_sigmoid",
    "absolute",
    "lift_fresh_copy",
    "lift_fresh",
    "zeros_like",
    "ones_like",
]:
    add(f"{_name}.default", f(4, 5))
for _name in ["add", "sub", "mul", "maximum", "atan2", "rsub", "multiply", "subtract"]:
    _overload = "default" if _name in ("maximum", "atan2") else "Tensor"
    add(f"{_name}.{_overload}", f(4, 5), f(4, 5))
    add(f"{_name}.{_overload}", f(3, 1, 5), f(4, 1))
    add(f"{_name}.{_overload}", f(4, 5), f())
add("add.Tensor", f(4, 5), f(5), alpha=2.5)
add("add.Tensor", f(4, 5), 1.5)
add("sub.Tensor", f(4, 5), 1.5)
add("rsub.Scalar", f(4, 5), 1.5)
add("subtract.Scalar", f(4, 5), 1.5)
add("mul.Tensor", f(4, 5), 1.5)
add("multiply.Scalar", f(4, 5), 1.5)
add("mul.Scalar", f(4, 5), 1.5)
for _name in ["div", "divide", "true_divide"]:
    add(f"{_name}.Tensor", f(4, 5), p(5))
    add(f"{_name}.Tensor", f(4, 5), 3.0)
    add(f"{_name}.Scalar", f(4, 5), 3.0)
add("div.Tensor_mode", f(4, 5), 0.3, rounding_mode="floor")
add("divide.Tensor_mode", f(4, 5), p(4, 5), rounding_mode="floor")
add("divide.Scalar_mode", f(4, 5), 0.3, rounding_mode="trunc")
add("pow.Tensor_Scalar", p(4, 5), 1.5)
add("pow.Scalar", 2.0, f(4, 5))
add("pow.Tensor_Tensor", p(4, 5), f(5))
add("clamp.default", f(4, 5), -0.5, 0.5)
add("where.self", b(4, 5), f(4, 5), f(5))
add("where.ScalarOther", b(4, 5), f(4, 5), 0.0)
add("where.ScalarOther", b(4, 5), f(4, 5), 2.0)
add("where.ScalarSelf", b(4, 5), 2.0, f(4, 5))
add("where.ScalarSelf", b(4, 5), 0.0, f(5))
add("where.Scalar", b(4, 5), 2.0, 1.0)
add("masked_fill.Scalar", f(4, 5), b(4, 5), 0.0)
add("masked_fill.Scalar", f(4, 5), b(5), -1.0)
# What is not finite by choice stays out of padding.
add("where.ScalarSelf", b(4, 5), float("-inf"), f(4, 5))
add("where.self", b(4, 5), f(4, 5), f(1, 5))
add("masked_fill.Scalar", f(4, 5), b(4, 5), float("-inf"))
add("masked_fill.Tensor", f(4, 5), b(5), f())
add("lerp.Scalar", f(4, 5), f(4, 5), 0.3)
add("lerp.Tensor", f(4, 5), f(4, 5), f(5))
add("addcmul.default", f(4, 5), f(4, 5), f(5), value=0.5)
add("addcdiv.default", f(4, 5), f(5), p(4, 5))
for _name in ["gt", "le", "eq"]:
    add(f"{_name}.Scalar", f(4, 5), 0.1)
    add(f"{_name}.Tensor", f(4, 5), f(5))
for _name in ["greater", "less", "not_equal", "greater_equal", "less_equal"]:
    add(f"{_name}.Scalar", f(4, 5), 0.1)
    add(f"{_name}.Tensor", f(4, 5), f(4, 1))
add("isclose.default", f(4, 5), f(5))
for _name in ["__and__", "__or__", "__xor__"]:
    add(f"{_name}.Tensor", b(4, 5), b(5))
    add(f"{_name}.Scalar", b(4, 5), True)
add("logical_and.default", b(4, 5), b(5))
add("fill.Scalar", f(4, 5), 2.0)
add("fill.Tensor", f(4, 5), f())
add("polar.default", p(4, 5), f(4, 5))
add("complex.default", f(4, 5), f(4, 5))
add("full_like.default", f(4, 5), 3.0)
add("full_like.default", f(4, 5), float("inf"))
add("to.dtype", f(4, 5), torch.float64)
add("to.dtype", f(4, 5), torch.bool)
add("to.dtype", i(5, 4, 5), torch.float64)
add("to.device", f(4, 5), torch.device("cpu"), torch.float64)
add("to.dtype_layout", f(4, 5), dtype=torch.float64)
add("to.other", i(5, 4, 5), f(3))
add("type_as.default", i(5, 4, 5), f(3))
add("dropout.default", f(4, 5), 0.0, True)
add("broadcast_tensors.default", [f(4, 5), f(5), f(4, 1)])

# Products.
add("mm.default", f(4, 5), f(5, 6))
add("bmm.default", f(4, 3, 5), f(4, 5, 6))
add("mv.default", f(4, 5), f(5))
add("dot.default", f(5), f(5))
add("vdot.default", f(5), f(5))
add("outer.default", f(4), f(5))
add("ger.default", f(4), f(5))
for _a, _b in [((5,), (5,)), ((4, 5), (5,)), ((5,), (5, 6)), ((2, 1, 4, 5), (3, 5, 6)), ((3, 4, 5), (5, 6))]:
    add("matmul.default", f(*_a), f(*_b))
add("linear.default", f(2, 4, 5), f(6, 5))
add("linear.default", f(4, 5), f(6, 5), f(6))
add("linear.default", f(2, 4, 5), f(6, 5), f(6))
add("linear.default", f(2, 4, 5), f(5))
add("addmm.default", f(6), f(4, 5), f(5, 6))
add("addmm.default", f(4, 6), f(4, 5), f(5, 6), beta=0.5, alpha=2.0)
add("baddbmm.default", f(2, 1, 6), f(2, 4, 5), f(2, 5, 6), beta=0.5)
add("addmv.default", f(4), f(4, 5), f(5), alpha=3)
add("einsum.default", "bse,ehd->bhsd", [f(2, 4, 5), f(5, 6, 3)])
add("einsum.default", "...i,ij->...j", [f(2, 4, 5), f(5, 6)])
add("einsum.default", "ij,jk", [f(4, 5), f(5, 6)])
add("einsum.default", "ij,jk,kl->il", [f(4, 5), f(5, 6), f(6, 2)])
add("einsum.default", "ij,j->i", [f(4, 5), f(1)])
add("einsum.default", "ij->ji", [f(4, 5)])
add("einsum.default", "ij->", [f(4, 5)])
add("tensordot.default", f(4, 5, 6), f(6, 4, 3), [0, 2], [1, 0])
add("inner.default", f(4, 5), f(2, 3, 5))
add("inner.default", f(4, 5), f())

# Reductions.
add("sum.default", f(4, 5))
for _dim in ([1], [0, -1], [], None):
    for _keep in (False, True):
        add("sum.dim_IntList", f(4, 5), _dim, _keep)
add("mean.default", f(4, 5))
add("mean.dim", f(4, 5, 3), [1], True)
add("mean.dim", f(4, 5), [0, 1])
for _name in ["amax", "amin"]:
    add(f"{_name}.default", f(4, 5), [1], True)
    add(f"{_name}.default", f(4, 5), [])
    add(f"{_name}.default", i(3, 4, 5), [1])
for _name in ["argmax", "argmin"]:
    add(f"{_name}.default", f(4, 5))
    add(f"{_name}.default", f(4, 5), 1, True)
    add(f"{_name}.default", i(3, 4, 5), 1)
for _name in ["max", "min"]:
    add(f"{_name}.default", f(4, 5))
    add(f"{_name}.dim", f(4, 5), 1)
    add(f"{_name}.dim", f(4, 5), 0, True)
add("logsumexp.default", f(4, 5), [1])
add("logsumexp.default", f(4, 5), [0, 1], True)
for _name in ["softmax.int", "log_softmax.int"]:
    add(_name, f(4, 5), -1)
    add(_name, f(4, 5, 3), 1, torch.float64)
for _name in ["_softmax.default", "_log_softmax.default"]:
    add(_name, f(4, 5), 1, False)
for _name in ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"]:
    add(f"{_name}.default", f(4, 5), 1)
for _name in ["var", "std"]:
    add(f"{_name}.correction", f(4, 5), [1], correction=1, keepdim=True)
    add(f"{_name}.correction", f(4, 5), None)
    add(f"{_name}.correction", f(4, 5), [0], correction=0)
    add(f"{_name}.default", f(4, 5), False)
    add(f"{_name}.default", f(4, 5))
    add(f"{_name}.dim", f(4, 5), [1], False, True)
add("var_mean.correction", f(4, 5), [1], correction=0)
for _name in ["any", "all"]:
    add(f"{_name}.default", b(4, 5))
    add(f"{_name}.dim", b(4, 5), 1, True)
    add(f"{_name}.dims", b(4, 5), [0, 1])
add("count_nonzero.default", i(2, 4, 5))
add("count_nonzero.dim_IntList", i(2, 4, 5), [1])
add("prod.default", f(4, 5))
add("prod.dim_int", f(4, 5), 1, True)
for _ord in (2, 1, 3, 0, float("inf"), float("-inf")):
    add("linalg_vector_norm.default", f(4, 5), _ord, [1])
add("linalg_vector_norm.default", f(4, 5))
add("norm.Scalar", f(4, 5))
add("norm.ScalarOpt_dim", f(4, 5), None, [1], True)
add("fx_feather::fill_padding.default", f(4, 5), [1], -1.0)
add("fx_feather::experts.default", f(2, 4, 3), i(4, 2, 4, 2), f(2, 4, 2), f(4, 3, 6), f(4, 3, 6), f(4, 6, 3))
add("fx_feather::amax_nograd.default", f(4, 5), [1], True)
add("fx_feather::amin_nograd.default", f(4, 5), [0, 1], False)

# Views.
VIEWS = [
    ((4, 6), (24,)),
    ((4, 6), (4, 2, 3)),
    ((24,), (4, 6)),
    ((2, 3, 4), (6, 4)),
    ((4, 1, 6), (4, 6)),
    ((12, 8), (16, 6)),
    ((6, 4), (4, 6)),
    ((4, 5), (1, 4, 5, 1)),
    ((1, 6), (1, 6)),
]
for _a, _b in VIEWS:
    for _name in ["view", "reshape", "_unsafe_view"]:
        add(f"{_name}.default", f(*_a), list(_b))
    add("view_as.default", f(*_a), f(*_b))
    add("reshape_as.default", f(*_a), f(*_b))
add("view.default", f(4, 6), [-1, 3])
add("flatten.using_ints", f(2, 4, 3), 1)
add("unflatten.int", f(3, 8), -1, [4, 2])
add("ravel.default", f(4, 6))
add("squeeze.default", f(1, 2, 3))
add("squeeze.dim", f(1, 2, 3), 1)
add("squeeze.dim", f(2, 1, 3), 1)
add("squeeze.dims", f(2, 1, 1, 3), [1, 2, 0])
add("unsqueeze.default", f(4, 5), 1)
add("unsqueeze.default", f(4, 5), -1)
add("transpose.int", f(4, 5, 2), 0, -1)
add("permute.default", f(4, 5, 2), [2, 0, 1])
add("t.default", f(4, 5))
for _name in ["movedim", "moveaxis"]:
    add(f"{_name}.int", f(4, 5, 2), 0, 2)
    add(f"{_name}.intlist", f(4, 5, 2), [0, 1], [1, 2])
for _name in ["swapaxes", "swapdims"]:
    add(f"{_name}.default", f(4, 5, 2), 0, 2)
for _name in ["numpy_T", "matrix_H", "mT", "mH", "adjoint"]:
    add(f"{_name}.default", f(4, 5))
add("expand.default", f(4, 1), [3, 4, 5])
add("expand.default", f(4, 1), [-1, 5])
add("expand.default", f(1, 5), [1, 5])
add("expand_as.default", f(4, 1), f(4, 5))
add("broadcast_to.default", f(4, 1), [4, 5])
for _name in ["repeat", "tile"]:
    add(f"{_name}.default", f(4, 5), [3, 1, 2])
add("repeat_interleave.self_int", f(4, 6), 2, 1)
add("repeat_interleave.self_int", f(4), 2)
add("split.Tensor", f(4, 5), 2, 1)
add("split.sizes", f(4, 5), [2, 3], 1)
add("split_with_sizes.default", f(4, 5), [2, 3], -1)
add("chunk.default", f(4, 5), 2, -1)
add("tensor_split.sections", f(4, 5), 2, 1)
add("tensor_split.indices", f(4, 5), [1, 2], 1)
add("unbind.int", f(3, 4))
add("select.int", f(4, 5), 1, -1)
add("select_scatter.default", f(4, 6), f(4), 1, -1)
add("slice_scatter.default", f(4, 6), f(4, 2), 1, 1, 6, 3)
add("slice_scatter.default", f(4, 6), f(3, 6), 0, -3)
add("diagonal_scatter.default", f(4, 4, 6), f(6, 3), 1)
add("index_put.default", f(4, 6, 2), [None, i(6, 1)], f(4, 1, 2))
add("index_put.default", f(4, 6, 2), [None, i(6, 3)], f(4, 3, 2), True)
add("index_put.default", f(4, 6, 2), [i(4, 3, 1), i(6, 4)], f(2), True)
add("index_put.default", f(4, 6, 2), [i(4, 3), None, i(2, 3)], f(3, 6), True)
add("slice.Tensor", f(4, 5), 1, 1, 4)
add("slice.Tensor", f(4, 5), 0, 0, 9223372036854775807)
add("slice.Tensor", f(4, 5), 0, 0, 4)
add("slice.Tensor", f(4, 6), 1, 0, 6, 2)
add("narrow.default", f(4, 5), 1, 1, 2)
add("narrow_copy.default", f(4, 5), 1, 0, 5)
add("cat.default", [f(4, 5), f(4, 2)], 1)
add("concat.default", [f(4, 5), f(4, 2)], -1)
add("concatenate.default", [f(3, 5), f(4, 5), f(0)])
add("stack.default", [f(4, 5), f(4, 5)], 1)
add("stack.default", [f(), f(), f()])
add("flip.default", f(4, 5), [1])
add("roll.default", f(4, 5), [2], [1])
add("roll.default", f(4, 5), [2])
add("tril.default", f(3, 4, 5))
add("triu.default", f(4, 5), 1)
add("diagonal.default", f(3, 4, 5), 0, 0, 2)
add("view_as_complex.default", f(4, 5, 2))
add("constant_pad_nd.default", f(4, 5), [1, 2])
add("constant_pad_nd.default", f(4, 5), [0, 0, 0, 1], 2.0)
add("pad.default", f(4, 5), [0, 1], "constant", 1.0)
add("pad.default", f(2, 4, 5), [1, 1], "reflect")
add("glu.default", f(4, 6))
add("floor_divide.default", i(9, 4, 5), 2)
add("floor_divide.Scalar", c(4, 5), 0.3)
add("view_as_real.default", Arg((4, 5), "complex"))

# Lookups.
add("embedding.default", f(7, 4), i(7, 3, 2))
add("embedding.default", f(7, 4), i(7, 3), 2)
add("gather.default", f(4, 7), 1, i(7, 4, 3))
add("gather.default", f(4, 7), 0, i(4, 2, 7))
add("gather.default", f(4, 7), 1, i(7, 2, 3))
add("gather.default", i(9, 4, 7), 1, i(7, 4, 1))
add("take_along_dim.default", f(4, 7), i(7, 4, 3), 1)
add("take_along_dim.default", f(4, 7), i(7, 1, 3), 1)
add("take_along_dim.default", f(4, 7), i(28, 5))
add("index_select.default", f(4, 7), 1, i(7, 3))
add("index_select.default", f(4, 7, 2), 0, i(4, 5))
add("index.Tensor", f(7, 4), [i(7, 3, 2)])
add("index.Tensor", f(3, 7, 4), [None, i(7, 5)])
add("index.Tensor", f(4, 7, 3), [i(4, 5), None, i(3, 2, 1)])
add("index.Tensor", f(4, 7, 3), [i(4, 5), i(7, 5)])
add("one_hot.default", i(5, 3, 4), 5)
add("scatter.src", f(4, 5), 1, i(5, 4, 3), f(4, 3))
add("scatter.value", f(4, 5), 1, i(5, 4, 1), 0.0)
add("scatter.value", f(4, 5), 1, i(5, 4, 1), 2.0)
add("scatter_add.default", f(4, 5), 1, i(5, 4, 3), f(4, 3))
add("index_add.default", f(4, 5), 0, i(4, 3), f(3, 5))
add("topk.default", f(4, 5), 2)
add("sort.default", f(4, 5), 1)
add("sort.stable", f(4, 5), stable=True, dim=0)
add("argsort.default", f(4, 5), 1)
add("argsort.stable", f(4, 5), stable=True, dim=0)
add("kthvalue.default", f(4, 5), 2, 1, True)

# Norms, attention, losses.
add("rms_norm.default", f(4, 6), [6], f(6))
add("rms_norm.default", f(4, 6), [6], f(6), 1e-5)
add("rms_norm.default", f(3, 4, 5), [4, 5])
add("layer_norm.default", f(4, 6), [6], f(6), f(6))
add("layer_norm.default", f(4, 6), [6])
add("layer_norm.default", f(3, 4, 5), [4, 5], f(4, 5))
add("group_norm.default", f(2, 8, 3), 4, f(8), f(8))
add("group_norm.default", f(2, 6, 2, 2), 3)
add("scaled_dot_product_attention.default", f(2, 4, 5, 3), f(2, 4, 6, 3), f(2, 4, 6, 2))
add("scaled_dot_product_attention.default", f(2, 4, 5, 3), f(2, 4, 5, 3), f(2, 4, 5, 3), None, 0.0, True)
add("scaled_dot_product_attention.default", f(1, 4, 5, 3), f(1, 2, 5, 3), f(1, 2, 5, 3), enable_gqa=True, scale=0.3)
add("scaled_dot_product_attention.default", f(2, 4, 5, 3), f(2, 4, 5, 3), f(2, 4, 5, 3), f(2, 1, 5, 5))
add("scaled_dot_product_attention.default", f(4, 5, 3), f(4, 5, 3), f(4, 5, 3), b(5, 5))
for _reduction in (0, 1, 2):
    add("cross_entropy_loss.default", f(4, 7), i(7, 4), None, _reduction)
    add("cross_entropy_loss.default", f(2, 7, 3), i(7, 2, 3), c(7), _reduction, 2, 0.1)
    add("cross_entropy_loss.default", f(4, 5), p(4, 5), c(5), _reduction, -100, 0.1)
    add("nll_loss_nd.default", f(4, 7), i(7, 4), None, _reduction, 3)
    add("nll_loss.default", f(4, 7), i(7, 4), c(7), _reduction)
    add("nll_loss2d.default", f(2, 5, 3, 2), i(5, 2, 3, 2), None, _reduction)
    for _name in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]:
        add(f"{_name}.default", f(4, 5), f(4, 5), _reduction)
    add("soft_margin_loss.default", f(4, 5), c(4, 5), _reduction)
    add("kl_div.default", f(4, 5), p(4, 5), _reduction)
    add("binary_cross_entropy.default", p(4, 5), c(4, 5), None, _reduction)
    add("binary_cross_entropy_with_logits.default", f(4, 5), c(4, 5), c(5), None, _reduction)
add("cross_entropy_loss.default", f(7), i(7), None, 1)
_key = i(1 << 40, 2)
add(
    "fx_feather::draw.default",
    _key,
    None,
    f(4, 5),
    [],
    [],
    [4, 5],
    [4, 5],
    3,
    "uniform",
    [0.0, 1.0],
    torch.float64,
    0,
    2,
)
add("fx_feather::fold_in.default", i(9, 3, 1), i(9, 4))
add("fx_feather::token_nll.default", f(4, 7), i(7, 4))
add("fx_feather::token_nll.default", f(2, 3, 5), i(5, 2, 3))
_adamw = (0.9, 0.95, 1e-3, 0.1)
for _shape in ((5,), (4, 6), ()):
    # An optimizer's step is not differentiated.
    add("fx_feather::adamw.default", c(*_shape), c(*_shape), c(), c(*_shape), c(*_shape), c(), c(), *_adamw)
    add("fx_feather::sum_squares.default", c(*_shape), c())

# What an optimizer looks up, or checks, on the host.
add("fx_feather::scheduled.default", i(9), named("twice", lambda k: 2.0 * k))
add("fx_feather::finite.default", c(), "a number")

# Factories: no operand, or one that gives its dtype only.
add("arange.default", 5)
add("arange.start", 1, 6)
add("arange.start_step", 1, 9, 2)
add("full.default", [4, 5], 2.0)
add("zeros.default", [4, 5])
add("ones.default", [4, 5])
add("scalar_tensor.default", 2.0)
add("eye.default", 4)
add("eye.m", 4, 5)
add("linspace.default", 0.0, 1.0, 5)
add("tril_indices.default", 3, 4)
add("triu_indices.default", 3, 4)
add("new_zeros.default", f(4, 5), [3])
add("new_ones.default", f(4, 5), [3])
add("new_full.default", f(4, 5), [3], 2.0)

# Operators that act on some dims and are a batch over the others.
for _bias in ([], [f(4)]):
    add("conv1d.default", f(3, 4, 6), f(4, 4, 3), *_bias)
    add("conv1d.padding", f(3, 4, 6), f(4, 4, 3), *_bias, *([] if _bias else [None]), [1], "same")
    add("conv2d.default", f(3, 4, 4, 4), f(4, 4, 2, 2), *_bias)
    add("conv_transpose1d.default", f(3, 4, 5), f(4, 4, 2), *_bias)
    add("conv_transpose2d.input", f(3, 4, 3, 3), f(4, 4, 2, 2), *_bias)
add("conv2d.default", f(3, 4, 3, 3), f(4, 2, 2, 2), None, [1, 1], [1, 1], [1, 1], 2)
add("conv2d.default", f(4, 4, 4), f(5, 4, 2, 2), None, [2, 2])
add("conv2d.padding", f(3, 4, 4, 4), f(4, 4, 2, 2), None, [1, 1], "same")
add("conv3d.default", f(2, 3, 3, 3, 3), f(4, 3, 2, 2, 2))
add("conv3d.padding", f(2, 3, 3, 3, 3), f(4, 3, 2, 2, 2), None, [1, 1, 1], "valid")
add("conv_transpose3d.input", f(2, 3, 2, 2, 2), f(3, 4, 2, 2, 2))
for _n in (1, 2, 3):
    _image = f(3, 4, *[4] * _n)
    add(f"avg_pool{_n}d.default", _image, [2] * _n)
    add(f"max_pool{_n}d.default", _image, [2] * _n)
    add(f"adaptive_avg_pool{_n}d.default", _image, [2] * _n)
    add(f"adaptive_max_pool{_n}d.default", _image, [2] * _n)
    add(f"upsample_nearest{_n}d.vec", _image, None, [2.0] * _n)
    _way = {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}[_n]
    add(f"upsample_{_way}.vec", _image, [5] * _n, False, None)
add("upsample_bicubic2d.vec", f(3, 4, 4, 4), [5, 5], True, None)
add("diff.default", f(4, 5), 1, 0)
add("diff.default", f(4, 5))
add("unfold.default", f(4, 6), 1, 3, 2)
add("im2col.default", f(3, 2, 3, 3), [2, 2], [1, 1], [0, 0], [1, 1])
add("col2im.default", f(3, 8, 4), [3, 3], [2, 2], [1, 1], [0, 0], [1, 1])
add("batch_norm.default", f(4, 5), None, None, None, None, True, 0.1, 1e-5, False)
add("batch_norm.default", f(4, 3, 2), f(3), f(3), None, None, True, 0.1, 1e-5, False)
add("batch_norm.default", f(4, 3, 2), f(3), f(3), c(3), c(3), False, 0.1, 1e-5, False)
add("instance_norm.default", f(4, 3, 5), None, None, None, None, True, 0.1, 1e-5, False)
add("instance_norm.default", f(4, 3, 5), f(3), f(3), None, None, True, 0.1, 1e-5, False)
add("prelu.default", f(4, 3, 2), f(3))
add("prelu.default", f(4, 3), f(1))
add("nansum.default", f(4, 5), [1])
add("nansum.default", f(4, 5))
add("nanmean.default", f(4, 5), [0], True)
add("aminmax.default", f(4, 5), dim=1)
add("aminmax.default", f(4, 5))
for _name in ("median", "nanmedian"):
    add(f"{_name}.dim", f(4, 5), 1)
    add(f"{_name}.default", f(4, 5))
add("mode.default", f(4, 5), 1)
for _name in ("quantile", "nanquantile"):
    add(f"{_name}.scalar", f(4, 5), 0.3, 1)
    add(f"{_name}.scalar", f(4, 5), 0.3, 0, True)
for _name in ("var_mean", "std_mean"):
    add(f"{_name}.dim", f(4, 5), [1])
    add(f"{_name}.default", f(4, 5))
add("var_mean.dim", Arg((4, 5), "complex"), [1])
add("linalg_vector_norm.default", Arg((4, 5), "complex"), 2, [1])
add("pairwise_distance.default", Arg((4, 5), "complex"), Arg((4, 5), "complex"))
add("std_mean.correction", f(4, 5), [0], correction=0)
add("cosine_similarity.default", f(4, 5), f(4, 5))
add("cosine_similarity.default", f(3, 1, 5), f(4, 5), -1)
add("pairwise_distance.default", f(4, 5), f(4, 5))
add("cdist.default", f(4, 5), f(3, 5))
add("cdist.default", f(2, 4, 5), f(2, 3, 5), 1.0)
add("bucketize.Tensor", f(4, 5), c(3))
add("searchsorted.Tensor", c(3), f(4, 5))
add("take.default", f(4, 5), i(20, 6))
add("scatter_reduce.two", f(4, 5), 1, i(5, 4, 3), f(4, 3), "sum")
add("scatter_reduce.two", f(4, 5), 0, i(4, 2, 5), f(2, 5), "amax")
add("index_copy.default", f(4, 5), 0, i(4, 1), f(1, 5))
add("index_fill.int_Scalar", f(4, 5), 0, i(4, 2), 1.5)
add("index_fill.int_Tensor", f(4, 5), 1, i(5, 2), f())
add("hstack.default", [f(4, 2), f(4, 3)])
add("vstack.default", [f(2, 4), f(3, 4)])
add("kron.default", f(2, 3), f(4, 2))
add("meshgrid.default", [f(4), f(3)])
add("meshgrid.indexing", [f(4), f(3)], indexing="xy")
add("pixel_shuffle.default", f(2, 8, 3, 3), 2)
add("pixel_unshuffle.default", f(2, 3, 4, 4), 2)
for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    add(f"fft_{_name}.default", f(4, 6), None, 1)
for _name in ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn"):
    add(f"fft_{_name}.default", f(3, 4, 6), None, [1, 2])

# Their results hold whatever is in memory.
UNDEFINED = {"aten.empty_like.default", "aten.empty.memory_format", "aten.new_empty.default"}

# Matrices, with an inverse and a root: a batch over all but the last two dims.
for _shape in [(4, 2, 2), (2, 5, 3, 3)]:
    for _name in ("det", "inv", "cholesky", "eigvalsh", "svdvals", "matrix_exp", "slogdet", "eigh", "qr", "svd"):
        add(f"linalg_{_name}.default", spd(*_shape))
    add("linalg_matrix_power.default", f(*_shape), 3)
    add("matrix_power.default", f(*_shape), 2)
    add("linalg_pinv.default", spd(*_shape), 1e-15)
    add("linalg_pinv.atol_rtol_tensor", spd(*_shape))
    add("linalg_solve.default", spd(*_shape), f(*_shape[:-1], 2))
    add("linalg_solve.default", spd(*_shape), f(*_shape[:-1]))
for _name in ("det", "inverse", "cholesky", "logdet", "matrix_exp", "slogdet"):
    add(f"{_name}.default", spd(4, 2, 2))
add("linalg_cross.default", f(4, 3), f(4, 3))
add("linalg_cross.default", f(5, 1, 3), f(1, 4, 3))
add("linalg_cross.default", f(3, 4), f(3, 4), dim=0)
add("cross.default", f(4, 3), f(4, 3), 1)
add("cross.default", f(5, 3, 2), f(5, 3, 2))
add("bilinear.default", f(4, 2), f(4, 3), f(5, 2, 3))
add("bilinear.default", f(2, 4, 2), f(2, 4, 3), f(5, 2, 3), f(5))
# Groups of channels that go to different ranks.
for _bias in ([], [f(6)]):
    add("conv1d.default", f(3, 6, 5), f(6, 1, 3), *(_bias or [None]), [1], [1], [1], 6)
    add("conv2d.default", f(3, 8, 3, 3), f(6, 4, 2, 2), *(_bias or [None]), [1, 1], [0, 0], [1, 1], 2)
    add("conv_transpose1d.default", f(3, 4, 5), f(4, 3, 2), *(_bias or [None]), [1], [0], [0], 2)
# Several indices, and rows that go with rows.
add("index.Tensor", f(7, 4, 5), [i(7, 3), i(4, 3)])
add("index.Tensor", f(7, 4, 5), [None, i(4, 3), i(5, 3)])
add("index.Tensor", f(7, 4, 5), [i(7, 3, 1), None, i(5, 2)])
