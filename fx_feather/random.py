"""Random numbers as functions of a key: the same bits in every layout, for any microbatches, and when drawn again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .draws import seeded as seeded
from .errors import FeatherError, fail
from .kernels.random import signed
from .settings import check, is_finite

Shape = Sequence[int] | Tensor


def key(seed: int) -> Tensor:
    """A key, int64[], from any integer: what the functions here draw by. One key gives one set of numbers.

    Raises:
        FeatherError: a seed that is no integer.

    >>> torch.equal(uniform(key(0), (3,)), uniform(key(0), (3,)))
    True
    """
    _check("key", seed=seed)
    return torch.tensor(signed(seed))


def fold_in(key: Tensor, data: Tensor | int) -> Tensor:
    """New keys from a key and numbers, such as those of a step or a layer: other ones for each number.

    Args:
        key: int64, of any shape.
        data: an integer, or int64 tensor that broadcasts with `key`.

    Returns:
        int64, of the shape that both broadcast to.

    Raises:
        FeatherError: a key or number that is not int64.

    >>> fold_in(key(0), torch.arange(4)).unique().shape
    torch.Size([4])
    """
    if not isinstance(data, Tensor):
        _check("fold_in", data=data)
        data = torch.tensor(signed(data), device=key.device if isinstance(key, Tensor) else None)
    for x in (key, data):
        _check_key("fold_in(key, data)", x, dims=None)
    return torch.ops.fx_feather.fold_in(key, data)


def split(key: Tensor, n: int = 2) -> Tensor:
    """`n` new keys from one, int64[n], to be used in its place.

    Raises:
        FeatherError: a key that is not int64[], or a number below 1.

    >>> first, second = split(key(0))
    >>> first.item() != second.item()
    True
    """
    _check_key("split(key)", key)
    check(FeatherError, "split", {"n": n}, [("n", isinstance(n, int) and n > 0, "one key becomes one or more", "n=2")])
    return fold_in(key, torch.arange(n, device=key.device))


def uniform(key: Tensor, shape: Shape, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Uniform numbers from `low` up to, and not including, `high` (but for rounding).

    Args:
        key: int64[].
        shape: of the result, or a tensor: the result is then shaped and split like it, and has its dtype.
        low, high: the bounds.
        dtype: of the result; float32, or that of the tensor, by default.

    Raises:
        FeatherError: a key that is not int64[], bounds out of order, or a dtype that is not floating point.

    >>> uniform(key(0), (2, 3)).shape
    torch.Size([2, 3])
    """
    fine = is_finite(low) and is_finite(high) and low <= high
    rule = ("low", fine, "low and high are finite and low <= high", "uniform(key, shape, 0.0, 1.0)")
    check(FeatherError, "uniform", {"low": low, "high": high}, [rule])
    return _drawn("uniform", key, shape, (low, high), dtype)


def normal(key: Tensor, shape: Shape, mean: float = 0.0, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Normal numbers; arguments as of `uniform`.

    By Box and Muller from two uniform numbers of 32 bits, in float64: none is beyond 6.8 standard deviations. They are
    made of operations that every device rounds alike, so they are the same bits everywhere too.

    Raises:
        FeatherError: a key that is not int64[], a negative `std`, or a dtype that is not floating point.

    >>> round(normal(key(0), (100_000,)).std().item(), 2)
    1.0
    """
    fine = is_finite(mean) and is_finite(std, least=0)
    rule = ("std", fine, "mean and std are finite, and std is not negative", "normal(key, shape, 0.0, 1.0)")
    check(FeatherError, "normal", {"mean": mean, "std": std}, [rule])
    return _drawn("normal", key, shape, (mean, std), dtype)


def bernoulli(key: Tensor, p: float, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
    """Ones with probability `p`, and zeros; arguments as of `uniform`.

    Raises:
        FeatherError: a key that is not int64[], or a probability outside of 0 to 1.

    >>> bernoulli(key(0), 1.0, (2,), torch.bool)
    tensor([True, True])
    """
    _check("bernoulli", p=p)
    return _drawn("bernoulli", key, shape, (p,), dtype, floating=False)


def dropout(key: Tensor, x: Tensor, p: float = 0.5) -> Tensor:
    """`x` with elements set to zero with probability `p`, and the others divided by `1 - p`.

    Args:
        key: int64[].
        x: floating point, of any shape.
        p: the probability.

    Raises:
        FeatherError: a key that is not int64[], or a probability outside of 0 to 1.

    >>> dropout(key(0), torch.ones(6), 0.5)
    tensor([2., 2., 0., 2., 0., 2.])
    """
    _check("dropout", p=p)
    if p == 1:
        return x * 0.0
    return x * _drawn("keep", key, x, (1.0 - p,), None)


def _drawn(
    kind: str, key: Tensor, shape: Shape, args: Sequence[float], dtype: torch.dtype | None, floating: bool = True
) -> Tensor:
    _check_key(f"{kind}(key, ...)", key)
    like = shape if isinstance(shape, Tensor) else None
    sizes = list(shape.shape if isinstance(shape, Tensor) else shape)
    if dtype is None:
        dtype = like.dtype if like is not None else torch.float32
    if floating and not dtype.is_floating_point:
        fail(
            FeatherError,
            call=f"{kind}(key, ...)",
            got=f"dtype {dtype}",
            number=f"{dtype} is not floating point",
            rule="random numbers of this kind are floating point",
            fix=f"{kind}(key, x, dtype=torch.float32)",
        )
    return torch.ops.fx_feather.draw(None, key, like, [], [], sizes, sizes, 0, kind, list(args), dtype, -1, 1)


def _check(call: str, **given: Any) -> None:
    checks = []
    for name, x in given.items():
        if name == "p":
            checks.append((name, is_finite(x, least=0) and x <= 1, "a probability is from 0 to 1", "p=0.1"))
        else:
            number = isinstance(x, int) and not isinstance(x, bool)
            checks.append((name, number, f"{name} is any integer", f"{name}=0"))
    check(FeatherError, call, given, checks)


def _check_key(call: str, key: Any, dims: int | None = 0) -> None:
    if isinstance(key, Tensor) and key.dtype == torch.int64 and dims in (None, key.ndim):
        return
    got = f"{key.dtype} of shape {list(key.shape)}" if isinstance(key, Tensor) else repr(key)
    fail(
        FeatherError,
        call=call,
        got=got,
        number=f"{got} is no key",
        rule="a key is an int64 tensor without dims, as ff.random.key makes it",
        fix="key = ff.random.key(seed), or one of ff.random.split(key, n)",
    )
