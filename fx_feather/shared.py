"""Collectives in shared memory: what ranks on one machine run, without a network between them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .channel import Channel, Rounds
from .reuse import held_alone

#: Bytes of a value up to which each rank reduces all of it, whatever the number of ranks.
_ALONE_BYTES = 32 << 10

#: Values of many are taken in groups of about so many places: what a group begins and ends with costs a round or two,
#: and all of its results take memory while its operands are still there.
GROUP_PLACES = 2

Reduce = Callable[..., Tensor]
Index = tuple[int | slice, ...]


class Joined:
    """Flat tensors joined along their one dim, as an operand that lies in no buffer of its own.

    Args:
        pieces: of one dtype.
    """

    def __init__(self, pieces: Sequence[Tensor]):
        self.pieces = list(pieces)
        self.dtype = pieces[0].dtype
        self.shape = (sum(p.shape[0] for p in pieces),)

    def __getitem__(self, at: Index) -> "Joined":
        """A part of it, as `parts` gives them: an empty index, or one slice."""
        if not at:
            return self
        start, stop, _ = at[0].indices(self.shape[0])  # type: ignore[union-attr]
        found, begin = [], 0
        for p in self.pieces:
            a, b = max(start - begin, 0), min(stop - begin, p.shape[0])
            if a < b:
                found.append(p if b - a == p.shape[0] else p[a:b])
            begin += p.shape[0]
        return Joined(found or [self.pieces[0][:0]])

    def __len__(self) -> int:
        return self.shape[0]

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Each piece, and where it lies in the whole."""
        at = 0
        for p in self.pieces:
            yield slice(at, at + p.shape[0]), p
            at += p.shape[0]


Operand = Tensor | Joined


def _cut(x: Operand, n: int) -> list[Any]:
    """Parts of a vector, of which the last may be shorter, or empty."""
    size = -(-x.shape[0] // n)
    return [x[(slice(p * size, (p + 1) * size),)] for p in range(n)]


def _parts_of(x: Operand) -> Iterable[tuple[slice, Tensor]]:
    return x.parts() if isinstance(x, Joined) else [(slice(None), x)]


def _fill(place: Tensor, x: Operand) -> None:
    for at, part in _parts_of(x):
        place[at].copy_(part)


def _read(x: Operand, place: Tensor) -> None:
    for at, part in _parts_of(x):
        part.copy_(place[at])


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

    def _places(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        places = self._channel.places(what, shape, dtype)
        return [places[k] for k in self._order]

    def _parts(self, shape: Sequence[int], dtype: torch.dtype, copies: int = 1) -> Iterator[Index]:
        return parts(shape, self._channel.place_bytes // copies // dtype.itemsize)

    def all_gather(self, x: Tensor, dim: int) -> Callable[[], Tensor]:
        """The values of all ranks, joined along a dim."""
        return self._channel.start(self._all_gather(x, dim))

    def _all_gather(self, x: Operand, dim: int) -> Rounds[Tensor]:
        shape = list(x.shape)
        shape[dim] *= len(self._order)
        out = rows = None
        for at in self._parts(x.shape, x.dtype):
            part = x[at]
            places = self._places(f"all_gather {dim}", part.shape, x.dtype)
            _fill(places[self._me], part)
            yield
            if out is None or rows is None:
                # Not before: what is gathered ahead takes no memory of this rank until it is waited for.
                out = torch.empty(shape, dtype=x.dtype)
                rows = _rows(out, dim, len(self._order))
            for row, place in zip(rows, places, strict=True):
                row[at].copy_(place)
        assert out is not None
        return out

    def reduce_scatter(self, x: Tensor, dim: int, reduce: Reduce) -> Callable[[], Tensor]:
        """This rank's part, along a dim, of the reduction of all values."""
        return self._channel.start(self._reduce_scatter(_rows(x, dim, len(self._order)), dim, reduce))

    def _reduce_scatter(self, rows: Sequence[Operand] | Tensor, dim: int, reduce: Reduce) -> Rounds[Tensor]:
        own, out = rows[self._me], None
        for at in self._parts(own.shape, own.dtype, len(rows)):
            places = self._show_rows(f"reduce_scatter {dim}", [row[at] for row in rows])
            yield
            if out is None:
                out = torch.empty(own.shape, dtype=own.dtype)
            self._reduce_row(places, own[at], out[at], reduce)
        assert out is not None
        return out

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Callable[[], Tensor]:
        """Parts along one dim, each sent to a rank, and what comes from all of them joined along another."""
        return self._channel.start(self._all_to_all(x, split_dim, concat_dim))

    def _all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Rounds[Tensor]:
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
            for k, (row, place) in enumerate(zip(came, places, strict=True)):
                row[at].copy_(rows[k][at] if k == self._me else place[self._me])
        assert out is not None
        return out

    def all_reduce(self, x: Tensor, reduce: Reduce) -> Callable[[], Tensor]:
        """The reduction of all values, written over `x`, which is contiguous."""
        flat = x.view(-1)
        wait = self._channel.start(self._all_reduce(flat, flat, reduce))

        def reduced_there() -> Tensor:
            wait()
            return x

        return reduced_there

    def _all_reduce(self, x: Operand, out: Operand, reduce: Reduce) -> Rounds[Operand]:
        alone = len(self._order) == 2 or x.shape[0] * x.dtype.itemsize <= _ALONE_BYTES
        return (self._reduce_all if alone else self._reduce_parts)(x, out, reduce)

    def many_all_reduce(self, xs: list[Tensor], reduce: Reduce) -> Callable[[], list[Tensor]]:
        """The reductions of `[n]` tensors of one dtype, in as few messages as if they were one.

        Where nobody else holds the operands by then, the results are written over them.
        """

        def of_group(group: list[Tensor]) -> Rounds[Operand]:
            own = all(held_alone(group, k) and group[k].is_contiguous() for k in range(len(group)))
            x = Joined(group)
            return self._all_reduce(x, x if own else torch.empty(x.shape, dtype=x.dtype), reduce)

        return self._many(xs, of_group, [])

    def many_all_gather(self, xs: list[Tensor]) -> Callable[[], list[Tensor]]:
        """For each of some `[n]` tensors the values of all ranks, `[ranks, n]`."""
        return self._many(xs, lambda group: self._all_gather(Joined(group), 0), [len(self._order)])

    def many_reduce_scatter(self, xs: list[Tensor], reduce: Reduce) -> Callable[[], list[Tensor]]:
        """For each of some `[ranks, n]` tensors this rank's row of the reduction, `[n]`."""

        def of_group(group: list[Tensor]) -> Rounds[Operand]:
            return self._reduce_scatter([Joined(of_rank) for of_rank in zip(*group, strict=True)], 0, reduce)

        return self._many(xs, of_group, [])

    def _many(
        self, xs: list[Tensor], collective: Callable[[list[Tensor]], Rounds[Any]], lead: list[int]
    ) -> Callable[[], list[Tensor]]:
        # The operands of a group are let go before the results of the next are made.
        groups: list[list[Tensor]] = [[]]
        room = self._channel.place_bytes * GROUP_PLACES
        xs.reverse()
        while xs:
            if room <= 0:
                groups.append([])
                room = self._channel.place_bytes * GROUP_PLACES
            room -= xs[-1].numel() * xs[-1].element_size()
            groups[-1].append(xs.pop())
        groups.reverse()

        def rounds() -> Rounds[list[Tensor]]:
            out: list[Tensor] = []
            while groups:
                group = groups.pop()
                sizes = [x.shape[-1] for x in group]
                under_way = collective(group)
                del group
                whole = yield from under_way
                del under_way
                if isinstance(whole, Joined):
                    out += whole.pieces
                else:
                    out += whole.view(*lead, sum(sizes)).split(sizes, -1)
            return out

        return self._channel.start(rounds())

    def _reduce_all(self, x: Operand, out: Operand, reduce: Reduce) -> Rounds[Operand]:
        for at in self._parts(x.shape, x.dtype):
            part = x[at]
            places = self._places(reduce.__name__, part.shape, x.dtype)
            _fill(places[self._me], part)
            yield
            for where, result in _parts_of(out[at]):
                reduced([place[where] for place in places], result, reduce)
        return out

    def _reduce_parts(self, x: Operand, out: Operand, reduce: Reduce) -> Rounds[Operand]:
        """Each rank reduces a part for all, and shows it while the next ones come: fewer bytes to read than above."""
        n, me = len(self._order), self._me
        most = n * (self._channel.place_bytes // (n + 1) // x.dtype.itemsize)
        # What was shown in the round before: the places, and the rows of the result, one a rank.
        shown: list[Tensor] = []
        own: Any = None
        results: list[Any] = []
        for at in (*parts(x.shape, most), None):
            rows = [] if at is None else _cut(x[at], n)
            places = self._places(reduce.__name__, (n + 1, max(len(r) for r in (*rows, *results))), x.dtype)
            if results:
                self._reduce_row([place[:, : len(own)] for place in shown], own, places[me][n, : len(own)], reduce)
            for k, row in enumerate(rows):
                if k != me:
                    _fill(places[me][k, : len(row)], row)
            yield
            for result, place in zip(results, places, strict=False):
                _read(result, place[n, : len(result)])
            shown, results = places, [] if at is None else _cut(out[at], n)
            own = None if at is None else rows[me]
        return out

    def _reduce_row(self, places: Sequence[Tensor], own: Operand, out: Tensor, reduce: Reduce) -> None:
        """The reduction of this rank's rows of all places, of which its own is read from where it came from."""
        for at, part in _parts_of(own):
            rows = [part if k == self._me else place[self._me][at] for k, place in enumerate(places)]
            reduced(rows, out[at], reduce)

    def permute(self, x: Tensor, source: int | None, sends: bool) -> Callable[[], Tensor]:
        """The value of one rank, zeros if there is none."""
        return self._channel.start(self._permute(x, source, sends))

    def _permute(self, x: Tensor, source: int | None, sends: bool) -> Rounds[Tensor]:
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

    def _show_rows(self, what: str, rows: Sequence[Operand]) -> list[Tensor]:
        """The places of a new round in which this rank shows each other the row that is meant for it."""
        places = self._places(what, (len(rows), *rows[0].shape), rows[0].dtype)
        for k, row in enumerate(rows):
            if k != self._me:
                _fill(places[self._me][k], row)
        return places


def reduced(values: Sequence[Tensor], out: Tensor, reduce: Reduce) -> Tensor:
    """The reduction of two or more values, in their order, written to `out`."""
    first, second, *rest = values
    reduce(first, second, out=out)
    for x in rest:
        reduce(out, x, out=out)
    return out


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
