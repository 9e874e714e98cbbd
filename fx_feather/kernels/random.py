"""Random numbers as a function of a key and of the place of an element in a whole tensor, as one operator."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA): element number i
# of a stream is a hash of `seed + (i + 1) * gamma`. Its hash takes eight passes over integers that torch has on every
# device, where ten rounds of Philox take twenty-five for the same bits.
GOLDEN = 0x9E3779B97F4A7C15
_DOMAIN = 0xD1B54A32D192ED03
_ALL = (1 << 64) - 1

#: Elements that are drawn at once on a CPU: what fits its cache, and is worth the call of an operator. Of so few torch
#: makes no threads, which would wait for each other a dozen times a tile where processes share the cores.
_TILE = 1 << 15

#: Digits of a uniform number: as many as its dtype holds, so that rounding never gives 1.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

#: What may be drawn, with the names of its numbers.
KINDS = {
    "uniform": ("low", "high"),
    "normal": ("mean", "std"),
    "bernoulli": ("p",),
    "keep": ("p",),
    "integers": ("low", "high"),
    "exponential": ("rate",),
}

_MASKS = ("bernoulli", "keep")


def signed(n: int) -> int:
    """The int64 with the low 64 bits of an integer."""
    return (n + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift_xor(z: Tensor, by: int, free: Tensor) -> None:
    torch.bitwise_right_shift(z, by, out=free)
    free.bitwise_and_((1 << (64 - by)) - 1)  # torch shifts the sign in
    z.bitwise_xor_(free)


def _mix_(z: Tensor, free: Tensor, how: tuple[int, int, int, int, int]) -> Tensor:
    a, m, b, n, c = how
    _shift_xor(z, a, free)
    z.mul_(signed(m))
    _shift_xor(z, b, free)
    z.mul_(signed(n))
    if c:
        _shift_xor(z, c, free)
    return z


_SPLITMIX = (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
#: For masks, which compare bits from the first on: the last step leaves the first 31 as they are.
_SHORT = (*_SPLITMIX[:4], 0)
_MURMUR = (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)


def mix(z: Tensor | int, how: tuple[int, int, int, int, int] = _SPLITMIX) -> Any:
    """SplitMix64's hash of each element of an int64 tensor, or of a Python number of 64 bits."""
    if isinstance(z, Tensor):
        return _mix_(z.clone(), torch.empty_like(z), how)
    a, m, b, n, c = how
    z &= _ALL
    z = (z ^ z >> a) * m & _ALL
    z = (z ^ z >> b) * n & _ALL
    return z ^ z >> c


def fold_in(key: Tensor | int, data: Tensor | int) -> Any:
    """New keys from a key and numbers, 64 bits each: other ones for each number, and for each key."""
    # A tensor wraps around by itself, and takes numbers with a sign.
    base = mix(key ^ signed(_DOMAIN))
    by = data * signed(GOLDEN)
    return mix(base + (signed(by) if isinstance(by, int) else by))


def stream(key: Tensor | int) -> tuple[Any, Any]:
    """Where the stream of a key starts, and its step, which is odd."""
    return key, mix(key + signed(GOLDEN), _MURMUR) | 1


def bits(first: Tensor, step: Tensor, count: int) -> Tensor:
    """The first `count` outputs of SplitMix64 for a seed and a step, int64[count]."""
    return mix(torch.arange(1, count + 1, device=first.device) * step + first)


def draw(
    run: Tensor | None,
    key: Tensor | None,
    like: Tensor | None,
    start: Sequence[Tensor],
    split: Sequence[int],
    shape: Sequence[int],
    whole: Sequence[int],
    site: int,
    kind: str,
    args: Sequence[float],
    dtype: torch.dtype,
    batch: int,
    parts: int,
) -> Tensor:
    """A part of a whole tensor of random numbers, which are the same whatever part is asked for.

    Args:
        run: int64[2], the key of a call and the number of its microbatch, for a draw inside of a program.
        key: int64[], a key given by hand; `run` gives it otherwise.
        like: a tensor whose split the result follows; its values are not read.
        start: for each dim in `split`, int64[], where the part begins in it.
        split: the dims in which the part is not the whole.
        shape: of the part.
        whole: of the whole tensor of a microbatch.
        site: the number of the draw among those of one key.
        kind: a name in `KINDS`.
        args: its numbers.
        dtype: of the result.
        batch: the dim that microbatches are cut along, -1 for none.
        parts: how many microbatches there are.

    Returns:
        A tensor of `shape`, on the device of the key.
    """
    given = key if key is not None else run
    assert given is not None, "a draw has a key"
    out = torch.empty(tuple(shape), dtype=dtype, device=given.device)
    if not out.numel():
        return out

    first, step = stream(fold_in(_number(given if key is not None else given.select(0, 0)), site))
    sizes = [n * parts if d == batch else n for d, n in enumerate(whole)]
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    place: Any = 1
    for at, d in zip(start, split, strict=True):
        place = place + _number(at) * strides[d]
    if batch >= 0 and run is not None:
        place = place + _number(run.select(0, 1)) * (whole[batch] * strides[batch])
    first = first + place * step
    if isinstance(first, int):
        first, step = signed(first), signed(step)
    # Elements that follow one another in the whole too are a row.
    cut = max((d for d in range(len(sizes)) if shape[d] != sizes[d]), default=0)
    if cut == 0 and out.numel() <= _TILE:
        z = torch.arange(out.numel(), device=out.device).mul_(step).add_(first)
        _write(out.view(-1), z, torch.empty_like(z), kind, args)
        return out
    first, step = (torch.as_tensor(x, device=out.device) for x in (first, step))
    heads = first.view(1)
    for d in range(cut):
        heads = (heads.unsqueeze(-1) + torch.arange(shape[d], device=out.device) * (strides[d] * step)).view(-1)
    _fill(out.view(-1, math.prod(shape[cut:])), heads, step, kind, args)
    return out


def _number(x: Tensor) -> Any:
    # On a CPU a dozen operators of 0-dim tensors would cost more than what a small tensor is drawn with.
    return x.item() if x.device.type == "cpu" else x


def _fill(out: Tensor, heads: Tensor, step: Tensor, kind: str, args: Sequence[float]) -> None:
    """Fills rows whose first elements have the states `heads`, tile by tile."""
    rows, columns = out.shape
    tile = _TILE if out.device.type == "cpu" else out.numel()
    wide, high = min(columns, tile), max(1, min(rows, tile // columns))
    places = torch.arange(wide, device=out.device) * step
    state, free = torch.empty((2, high * wide), dtype=torch.int64, device=out.device).unbind()
    for c in range(0, columns, wide):
        beside = heads if c == 0 else heads + step * c
        n = min(wide, columns - c)
        for r in range(0, rows, high):
            part = out[r : r + high, c : c + n]
            z, spare = state[: part.numel()].view(part.shape), free[: part.numel()].view(part.shape)
            torch.add(beside[r : r + high, None], places[None, :n], out=z)
            _write(part, z, spare, kind, args)


def _write(out: Tensor, z: Tensor, free: Tensor, kind: str, args: Sequence[float]) -> None:
    """Makes numbers of a kind of the states of their elements; it may write over both scratch tensors."""
    _mix_(z, free, _SHORT if kind in _MASKS else _SPLITMIX)
    if kind in _MASKS:
        (p,) = args
        if p == 1:
            out.fill_(1)
        else:
            torch.lt(z, round(p * 2.0**64) - (1 << 63), out=out)
        if kind == "keep":
            out.mul_(1.0 / p)
    elif kind == "uniform":
        digits = _DIGITS.get(out.dtype, 53)
        out.copy_(_top(z, digits)).mul_(2.0**-digits)
        low, high = args
        if (low, high) != (0, 1):
            out.mul_(high - low).add_(low)
    elif kind == "integers":
        low, high = (int(a) for a in args)
        out.copy_(_top(z, 63).remainder_(high - low).add_(low))
    else:
        torch.bitwise_right_shift(z, 32, out=free)
        log = _log(free.bitwise_and_(0xFFFFFFFF).to(torch.float64).add_(0.5).mul_(2.0**-32))
        if kind == "exponential":
            out.copy_(log.mul_(-1.0 / args[0]))
            return
        # Box and Muller 1958: one normal number of two uniform ones.
        mean, std = args
        turn = _cosine(z.bitwise_and_(0xFFFFFFFF).to(torch.float64).mul_(2.0**-32))
        out.copy_(log.mul_(-2.0).sqrt_().mul_(turn).mul_(std).add_(mean))


# Libraries round logarithms and cosines each in its own way, and not alike at the ends of a tensor. Made of sums,
# products, quotients and roots in float64, whose rounding a standard fixes, they are the same bits everywhere. What is
# left out of the series is below 1e-8, where the uniform numbers have 32 bits.


def _log(x: Tensor) -> Tensor:
    """Natural logarithms of float64 in (0, 1), which is written over: from `m` in [0.7, 1.4) times a power of two."""
    bits = x.view(torch.int64).add_(0x3FF00000_00000000 - 0x3FE6A09E_00000000)
    power = bits.bitwise_right_shift(52).to(torch.float64).sub_(0x3FF)
    bits.bitwise_and_(0x000FFFFF_FFFFFFFF).add_(0x3FE6A09E_00000000)
    s = (x - 1.0).div_(x.add_(1.0))
    square = s * s
    return power.mul_(math.log(2.0)).add_(_series(square, [2 / k for k in (1, 3, 5, 7, 9, 11)]).mul_(s))


def _cosine(x: Tensor) -> Tensor:
    """`cos(2 pi x)` of float64 in [0, 1), which is written over, as `2 sin(pi (x - 1/2))^2 - 1`."""
    square = x.sub_(0.5).mul_(math.pi).square_()
    sine = _series(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(7)])
    return sine.square_().mul_(square).mul_(2.0).sub_(1.0)


def _series(x: Tensor, factors: list[float]) -> Tensor:
    *rest, last = factors
    out = x * last
    for factor in reversed(rest[1:]):
        out.add_(factor).mul_(x)
    return out.add_(rest[0])


def _top(z: Tensor, digits: int) -> Tensor:
    return z.bitwise_right_shift_(64 - digits).bitwise_and_((1 << digits) - 1)


def _shape(
    run: Tensor | None,
    key: Tensor | None,
    like: Tensor | None,
    start: Sequence[Tensor],
    split: Sequence[int],
    shape: Sequence[int],
    whole: Sequence[int],
    site: int,
    kind: str,
    args: Sequence[float],
    dtype: torch.dtype,
    batch: int,
    parts: int,
) -> Tensor:
    given = key if key is not None else run
    assert given is not None, "a draw has a key"
    return given.new_empty(tuple(shape), dtype=dtype)


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define(
    "draw(Tensor? run, Tensor? key, Tensor? like, Tensor[] start, int[] split, int[] shape, int[] whole, int site, "
    "str kind, float[] args, ScalarType dtype, int batch, int parts) -> Tensor"
)
_library.impl("draw", draw, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::draw", _shape, lib=_library)


def _folded(key: Tensor, data: Tensor) -> Tensor:
    return fold_in(key, data)


def _folded_shape(key: Tensor, data: Tensor) -> Tensor:
    return key.new_empty(torch.broadcast_shapes(key.shape, data.shape))


_library.define("fold_in(Tensor key, Tensor data) -> Tensor")
_library.impl("fold_in", _folded, "CompositeExplicitAutograd")
torch.library.register_fake("fx_feather::fold_in", _folded_shape, lib=_library)

# Neither has a gradient: autograd passes them by.
for _name in ("draw", "fold_in"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
