"""Rules of operators on images [batch, channels, *space]: convolutions, windows, pools, resizing, norms a channel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import RuleError, fail
from .batched import Shard, last
from .pointwise import named, padding_harmless, sets, sizes_of
from .reduce import wide
from .rule import Dim, Factors, OpCall, Rule, Sharding, register

for _n in (1, 2, 3):
    register(f"avg_pool{_n}d.default adaptive_avg_pool{_n}d.default", Rule(last(_n, linear=True), text="... !s -> ..."))
    register(f"max_pool{_n}d.default adaptive_max_pool{_n}d.default", Rule(last(_n), text="... !s -> ..."))
    register(f"upsample_nearest{_n}d.vec", Rule(last(_n, linear=True), text="... !s -> ..."))
for _name in ("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_bicubic2d.vec", "upsample_trilinear3d.vec"):
    register(_name, Rule(last(int(_name[-6]), linear=True), text="... !s -> ..."))


def _of_images(call: OpCall) -> Sharding:
    # [batch, ...] or without a batch; the result has as many dims less or as many more.
    x, out = call.operands[0], call.outs[0]
    factors = named(x.shape)
    batched = x.ndim == (4 if call.target is torch.ops.aten.im2col.default else 3)
    whole = frozenset(f"d{i}" for i in range(int(batched), x.ndim))
    result: Factors = (factors[0], *((),) * (out.ndim - 1)) if batched else ((),) * out.ndim
    return Sharding((factors,), (result,), sizes_of((factors, x.shape)), whole=whole, linear=sets([x]))


register("im2col.default col2im.default", Rule(_of_images, text="n !... -> n ..."))


def _convolution(space: int, transposed: bool) -> Shard:
    def shard(call: OpCall) -> Sharding:
        x, weight, *bias = call.operands
        batch: Factors = (("n",),) if x.ndim == space + 2 else ()
        of_space, of_kernel = (tuple((f"{c}{i}",) for i in range(space)) for c in "sk")
        groups = call.arg(6, "groups", 1)
        # A group of channels goes with its own kernels.
        c: Dim = ("c",) if groups == 1 else ("g", "c")
        o: Dim = ("o",) if groups == 1 else ("g", "o")
        kernel: Factors = (c, ("o",)) if transposed else (o, ("c",))
        of_x: Factors = (*batch, c, *of_space)
        of_weight: Factors = (*kernel, *of_kernel)
        of_bias: tuple[Factors, ...] = ((o,),) if bias else ()
        out: Factors = (*batch, o, *((),) * space)
        channels = call.outs[0].shape[len(batch)]
        sizes = {f: n for (f,), n in zip((*of_space, *of_kernel), (*x.shape[-space:], *weight.shape[2:]), strict=True)}
        sizes |= {"c": x.shape[len(batch)] // groups, "o": channels // groups, "g": groups}
        sizes |= {"n": x.shape[0]} if batch else {}
        whole = {f for dim in (*of_space, *of_kernel) for f in dim}
        whole |= {"c", "o"} if groups != 1 else {"c"} if bias else set()

        def rewrite(args: tuple[Any, ...], kwargs: dict[str, Any], shapes: list[tuple[int, ...]]) -> Any:
            own = groups * shapes[0][len(batch)] // channels
            return (*args[:6], own, *args[7:]) if len(args) > 6 else args, kwargs | (
                {"groups": own} if "groups" in kwargs else {}
            )

        linear = sets([x, *bias], [weight, *bias])
        return Sharding(
            (of_x, of_weight, *of_bias), (out,), sizes, whole=frozenset(whole), linear=linear,
            rewrite=rewrite if groups != 1 else None,
        )  # fmt: skip

    return shard


for _n in (1, 2, 3):
    _text = "n c !s, o c !k, o -> n o s"
    register(f"conv{_n}d.default conv{_n}d.padding", Rule(_convolution(_n, False), text=_text))
    _transposed = f"conv_transpose{_n}d.{'default' if _n == 1 else 'input'}"
    register(_transposed, Rule(_convolution(_n, True), text="n c !s, c o !k, o -> n o s"))


def _no_buffers(call: OpCall, own_statistics: bool) -> None:
    if own_statistics and (call.arg(3, "running_mean") is not None or call.arg(4, "running_var") is not None):
        fail(
            RuleError,
            call=str(call.target),
            got="running statistics that are updated in place",
            number="running_mean and running_var are written to",
            rule="a step writes to no buffer: whatever changes is a result of the step",
            fix="pass None for both; return x.mean and x.var as auxiliary values to keep them",
        )


def _channelled(statistics: Callable[[OpCall], tuple[bool, bool]]) -> Shard:
    """Shard function of a norm with statistics a channel; says if it takes its own, and if over the batch as well."""

    def shard(call: OpCall) -> Sharding:
        x, *rest = call.operands
        own, with_batch = statistics(call)
        _no_buffers(call, own)
        factors = named(x.shape)
        acted = [i for i in range(x.ndim) if i != 1 and (i > 1 or with_batch)] if own else []
        return Sharding(
            (factors, *((("d1",),) for _ in rest)),
            (factors,),
            sizes_of((factors, x.shape)),
            whole=frozenset(f"d{i}" for i in acted),
            run=padding_harmless,
        )

    return shard


def _normed(x: Tensor, weight: Any, bias: Any, dims: list[int], eps: float) -> Tensor:
    channel = [-1 if i == 1 else 1 for i in range(x.dim())]
    exact = x.to(wide(x.dtype))
    off = exact - exact.mean(dims, True)
    out = off * torch.rsqrt((off * off).mean(dims, True) + eps)
    out = out if weight is None else out * weight.reshape(channel)
    return (out if bias is None else out + bias.reshape(channel)).to(x.dtype)


def batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *options: Any) -> Tensor:
    """`torch.nn.functional.batch_norm` with the statistics of the whole batch, in operators that may be split."""
    return _normed(x, weight, bias, [i for i in range(x.dim()) if i != 1], options[2])


def instance_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *options: Any) -> Tensor:
    """`torch.nn.functional.instance_norm` in operators that may be split."""
    return _normed(x, weight, bias, list(range(2, x.dim())), options[2])


register(
    "batch_norm.default",
    Rule(_channelled(lambda call: (bool(call.arg(5, "training")), True)), batch_norm, text="!n c !s, c, c -> n c s"),
)
register(
    "instance_norm.default",
    Rule(
        _channelled(lambda call: (bool(call.arg(5, "use_input_stats")), False)), instance_norm, text="n c !s -> n c s"
    ),
)


def _prelu(call: OpCall) -> Sharding:
    x, weight = call.operands
    factors = named(x.shape)
    channel = factors[min(1, x.ndim - 1)] if x.ndim else ()
    of_weight: Factors = ((channel,) if weight.shape[0] > 1 else ((),)) if weight.ndim else ()
    return Sharding((factors, of_weight), (factors,), sizes_of((factors, x.shape)))


register("prelu.default", Rule(_prelu, text="n c ..., c -> n c ..."))


def _pixel_shuffle(x: Tensor, r: int) -> Tensor:
    *lead, c, h, w = x.shape
    n = len(lead)
    y = x.reshape(*lead, c // (r * r), r, r, h, w)
    return y.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2).reshape(*lead, c // (r * r), h * r, w * r)


def _pixel_unshuffle(x: Tensor, r: int) -> Tensor:
    *lead, c, h, w = x.shape
    n = len(lead)
    y = x.reshape(*lead, c, h // r, r, w // r, r)
    return y.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3).reshape(*lead, c * r * r, h // r, w // r)


register("pixel_shuffle.default", Rule(last(3), _pixel_shuffle, text="... !c !h !w -> ..."))
register("pixel_unshuffle.default", Rule(last(3), _pixel_unshuffle, text="... !c !h !w -> ..."))
