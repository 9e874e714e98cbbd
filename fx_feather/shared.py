"""Collectives in shared memory: what ranks on one machine run, without a network between them."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .channel import Channel, Rounds

#: Bytes of a value up to which each rank reduces all of it, whatever the number of ranks.
_ALONE_BYTES = 32 << 10

Reduce = Callable[..., Tensor]
Index = tuple[int | slice, ...]


class Shared:
    """The collectives of some ranks over their channel: each gives, for the local operand, what waits for the result.

    Sums are taken in the order of the ranks, the same bits as in a simulation. Values are written from where they lie
    into shared memory, and read from there to where they belong, in parts that fit.

    Args:
        channel: of the group.
        order: for each rank, in the order of the axes, its index in the group.
    """

    def __init__(self, channel: Channel, order: Sequence[int]):
        self._channel = channel
        self._order = list(order)
        self._me = self._order.index(channel.index)
        self._others = [p for p in range(len(self._order)) if p != self._me]

    def _places(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        places = self._channel.places(what, shape, dtype)
        return [places[k] for k in self._order]

    def _parts(self, shape: Sequence[int], dtype: torch.dtype, copies: int = 1) -> Iterator[Index]:
        return parts(shape, self._channel.place_bytes // copies // dtype.itemsize)

    def all_gather(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """The values of all ranks, joined along a dim."""
        return self._channel.start(self._all_gather(x, dim))

    def _all_gather(self, x: Tensor, dim: int) -> Rounds:
        shape = list(x.shape)
        shape[dim] *= len(self._order)
        out = rows = None
        for at in self._parts(x.shape, x.dtype):
            part = x[at]
            places = self._places(f"all_gather {dim}", part.shape, x.dtype)
            places[self._me].copy_(part)
            yield
            if out is None or rows is None:
                # Not before: what is gathered ahead takes no memory of this rank until it is waited for.
                out = x.new_empty(shape)
                rows = _rows(out, dim, len(self._order))
                rows[self._me].copy_(x)
            for p in self._others:
                rows[p][at].copy_(places[p])
        assert out is not None
        return out

    def reduce_scatter(self, x: Tensor, dim: int, reduce: Reduce) -> Callable[[], Tensor]:
        """This rank's part, along a dim, of the reduction of all values."""
        return self._channel.start(self._reduce_scatter(x, dim, reduce))

    def _reduce_scatter(self, x: Tensor, dim: int, reduce: Reduce) -> Rounds:
        rows = _rows(x, dim, len(self._order))
        out = None
        for at in self._parts(rows.shape[1:], x.dtype, len(self._order)):
            places = self._show_rows(f"reduce_scatter {dim}", [row[at] for row in rows])
            yield
            if out is None:
                out = x.new_empty(rows.shape[1:])
            _reduced(self._mine(places, rows[self._me][at]), out[at], reduce)
        assert out is not None
        return out

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Callable[[], Tensor]:
        """Parts along one dim, each sent to a rank, and what comes from all of them joined along another."""
        return self._channel.start(self._all_to_all(x, split_dim, concat_dim))

    def _all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Rounds:
        n = len(self._order)
        shape = list(x.shape)
        shape[split_dim] //= n
        shape[concat_dim] *= n
        rows = _rows(x, split_dim, n)
        out = came = None
        for at in self._parts(rows.shape[1:], x.dtype, n):
            places = self._show_rows(f"all_to_all {split_dim} {concat_dim}", [row[at] for row in rows])
            yield
            if out is None or came is None:
                out = x.new_empty(shape)
                came = _rows(out, concat_dim, n)
                came[self._me].copy_(rows[self._me])
            for p in self._others:
                came[p][at].copy_(places[p][self._me])
        assert out is not None
        return out

    def all_reduce(self, x: Tensor, reduce: Reduce) -> Callable[[], Tensor]:
        """The reduction of all values, written over `x`, which is contiguous."""
        size = x.numel() * x.element_size()
        alone = len(self._order) == 2 or size <= _ALONE_BYTES
        return self._channel.start((self._reduce_all if alone else self._reduce_parts)(x, reduce))

    def _reduce_all(self, x: Tensor, reduce: Reduce) -> Rounds:
        flat = x.view(-1)
        for at in self._parts(flat.shape, x.dtype):
            part = flat[at]
            places = self._places("all_reduce", part.shape, x.dtype)
            places[self._me].copy_(part)
            yield
            _reduced(places, part, reduce)
        return x

    def _reduce_parts(self, x: Tensor, reduce: Reduce) -> Rounds:
        """Each rank reduces one part for all: fewer bytes to read, and twice the rounds."""
        n, flat = len(self._order), x.view(-1)
        most = n * (self._channel.place_bytes // n // x.element_size())
        for at in parts(flat.shape, most):
            whole = flat[at]
            size = -(-whole.numel() // n)
            rows = [whole[p * size : (p + 1) * size] for p in range(n)]  # the last ones may be shorter, or empty
            places = self._places("all_reduce", (n, size), x.dtype)
            for p in self._others:
                places[self._me][p][: len(rows[p])].copy_(rows[p])
            yield
            own, k = rows[self._me], len(rows[self._me])
            shown = self._places("all_reduce: all", (size,), x.dtype)
            _reduced([x[:k] for x in self._mine(places, own)], shown[self._me][:k], reduce)
            own.copy_(shown[self._me][:k])
            yield
            for p in self._others:
                rows[p].copy_(shown[p][: len(rows[p])])
        return x

    def permute(self, x: Tensor, source: int | None, sends: bool) -> Callable[[], Tensor]:
        """The value of one rank, zeros if there is none."""
        return self._channel.start(self._permute(x, source, sends))

    def _permute(self, x: Tensor, source: int | None, sends: bool) -> Rounds:
        out = None
        for at in self._parts(x.shape, x.dtype):
            part = x[at]
            places = self._places("ppermute", part.shape, x.dtype)
            if sends:
                places[self._me].copy_(part)
            yield
            if out is None:
                out = x.new_zeros(x.shape) if source is None else x.new_empty(x.shape)
            if source is not None:
                out[at].copy_(places[source])
        assert out is not None
        return out

    def _show_rows(self, what: str, rows: Sequence[Tensor]) -> list[Tensor]:
        """The places of a new round in which this one shows each other rank the row that is meant for it."""
        places = self._places(what, (len(rows), *rows[0].shape), rows[0].dtype)
        for p in self._others:
            places[self._me][p].copy_(rows[p])
        return places

    def _mine(self, places: Sequence[Tensor], own: Tensor) -> list[Tensor]:
        """What each rank shows to this one, and its own value in its place."""
        return [own if p == self._me else place[self._me] for p, place in enumerate(places)]


def _reduced(values: Sequence[Tensor], out: Tensor, reduce: Reduce) -> None:
    first, second, *rest = values
    reduce(first, second, out=out)
    for x in rest:
        reduce(out, x, out=out)


def _rows(x: Tensor, dim: int, n: int) -> Tensor:
    """A view of the `n` equal parts along a dim, as `[n, ...]`."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def parts(shape: Sequence[int], most: int) -> Iterator[Index]:
    """Indices of parts of a tensor, of at most so many elements each, that together are all of it.

    >>> list(parts((3, 4), 100))
    [()]
    >>> list(parts((3, 4), 8))
    [(slice(0, 2, None),), (slice(2, 4, None),)]
    >>> list(parts((2, 4), 3))
    [(0, slice(0, 3, None)), (0, slice(3, 6, None)), (1, slice(0, 3, None)), (1, slice(3, 6, None))]
    """
    if math.prod(shape) <= most:
        yield ()
        return
    row = math.prod(shape[1:])
    if row <= most:
        step = most // row
        for a in range(0, shape[0], step):
            yield (slice(a, a + step),)
        return
    for i in range(shape[0]):
        for rest in parts(shape[1:], most):
            yield (i, *rest)
