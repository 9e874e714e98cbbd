"""Transport: how one rank runs each collective: in shared memory, or by `torch.distributed` on gloo or NCCL."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel
from .collectives import COLLECTIVES
from .shared import Shared, reduced

Static = dict[str, Any]
#: Starts a collective, and gives what waits for its result.
Start = Callable[[Tensor], Callable[[], Tensor]]

# Later versions of torch give these two shorter names, and warn of the older ones.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclasses.dataclass(frozen=True)
class Peers:
    """The ranks that take part in a collective, as one of them sees it.

    Attributes:
        ranks: of the world, in the order of the axes.
        index: this rank's place among them.
        device: where their values are.
        group: the process group; None for what only moves local values.
        channel: shared memory of the group, if its ranks are on one machine and their values on its CPU.
    """

    ranks: list[int]
    index: int
    device: torch.device
    group: Any = None
    channel: Channel | None = None

    def __len__(self) -> int:
        return len(self.ranks)

    @ft.cached_property
    def places(self) -> list[int] | None:
        """For each place in the order of the axes that among the ranks in rising order, as torch.distributed has them.

        None where the two are the same: in all groups whose axes stand as in the mesh.
        """
        rising = sorted(self.ranks)
        places = [rising.index(r) for r in self.ranks]
        return None if places == sorted(places) else places

    @property
    def inverse(self) -> list[int] | None:
        """For each place among the ranks in rising order that in the order of the axes."""
        return None if self.places is None else [self.places.index(i) for i in range(len(self))]

    @ft.cached_property
    def shared(self) -> Shared | None:
        """The collectives in shared memory."""
        return None if self.channel is None else Shared(self.channel, self.places or range(len(self)))


def bind(name: str, peers: Peers, static: Static) -> Callable[..., Tensor]:
    """The function that runs a collective for one rank, from its local operand to its local result.

    Its attributes are those that `reuse`, `deferred`, `unbuffered` and `together` read.
    """
    if len(peers) == 1:
        reference = COLLECTIVES[name].reference
        return _fresh(name, lambda *x: copied(reference(list(x) or [torch.empty(0)], **static)[0]))
    if name == "axis_index":
        return _axis_index(peers, static)
    run = _waiting(name, _START[name](peers, static), name in _COMMUNICATE)
    if name in _REDUCTIONS:
        run.in_place = _waiting(name, _all_reduce(peers, static, name, own=True), True)
        run.start.reads = False
        run.start.in_place = run.in_place.start
    if peers.shared and name in _MANY and static.get("dim", 0) == 0:
        run.many = _waiting(name, ft.partial(_MANY[name], peers.shared), True)
        run.many.ranks = len(peers)
    if name == "pscatter":
        run.view = ft.partial(_own_part, peers, static["dim"])
    return run


def _fresh(name: str, fn: Callable[..., Any]) -> Any:
    def run(*x: Tensor) -> Any:
        return fn(*x)

    run.__name__ = name
    run.fresh = True  # type: ignore[attr-defined]
    return run


def _waiting(name: str, start: Callable[..., Callable[[], Any]], communicates: bool) -> Any:
    run = _fresh(name, lambda x: start(x)())
    if communicates:
        run.start = _fresh(f"start_{name}", start)
    return run


def copied(x: Tensor) -> Tensor:
    """A copy with the strides that a program expects of a collective's result, whatever those of `x` are."""
    return x.clone(memory_format=torch.contiguous_format)


def _exchange(rows: Tensor, peers: Peers) -> Callable[[], Tensor]:
    """Sends row `i` of `[ranks, ...]` to rank `i` of those in rising order, and gives what all of them sent here."""
    out = torch.empty_like(rows)
    work = dist.all_to_all_single(out, rows, group=peers.group, async_op=True)
    return lambda: _after(work, out)


def _after(work: Any, out: Tensor) -> Tensor:
    # The work itself keeps what it sends and what it receives.
    work.wait()
    return out


_REDUCTIONS: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "psum": (torch.add, dist.ReduceOp.SUM),
    "pmax": (torch.maximum, dist.ReduceOp.MAX),
}


_MANY: dict[str, Callable[[Shared, list[Tensor]], Callable[[], list[Tensor]]]] = {
    "psum": lambda shared, xs: shared.many_all_reduce(xs, torch.add),
    "all_gather": Shared.many_all_gather,
    "reduce_scatter": lambda shared, xs: shared.many_reduce_scatter(xs, torch.add),
}


def _all_reduce(peers: Peers, static: Static, name: str, own: bool = False) -> Start:
    def start(x: Tensor) -> Callable[[], Tensor]:
        out = x if own and x.is_contiguous() else copied(x)
        if peers.shared:
            return peers.shared.all_reduce(out, _REDUCTIONS[name][0])
        work = dist.all_reduce(out, op=_REDUCTIONS[name][1], group=peers.group, async_op=True)
        return lambda: _after(work, out)

    return start


def _all_gather(peers: Peers, static: Static) -> Start:
    dim, n = static["dim"], len(peers)

    def joined(flat: Tensor) -> Tensor:
        flat = flat if peers.places is None else flat[peers.places]
        shape = list(flat.shape[1:])
        shape[dim] *= n
        return flat.view(shape) if dim == 0 else flat.movedim(0, dim).reshape(shape).contiguous()

    def start(x: Tensor) -> Callable[[], Tensor]:
        if peers.shared:
            return peers.shared.all_gather(x, dim)
        flat = x.new_empty((n, *x.shape))
        work = _gather_flat(flat.view(-1), x.contiguous().view(-1), group=peers.group, async_op=True)
        return lambda: joined(_after(work, flat))

    return start


def _reduce_scatter(peers: Peers, static: Static) -> Start:
    dim, n = static["dim"], len(peers)

    def start(x: Tensor) -> Callable[[], Tensor]:
        if peers.shared:
            return peers.shared.reduce_scatter(x, dim, torch.add)
        shape = list(x.shape)
        shape[dim] //= n
        rows = x.view(*x.shape[:dim], n, *shape[dim:]) if x.is_contiguous() else x.unflatten(dim, (n, shape[dim]))
        rows = rows.movedim(dim, 0)
        rows = (rows if peers.inverse is None else rows[peers.inverse]).contiguous()
        if dist.get_backend(peers.group) == "gloo":
            # Its own is an all-reduce of which a part is kept: twice the bytes.
            parts = _exchange(rows, peers)
            return lambda: reduced(_in(parts().unbind(0), peers.places), x.new_empty(shape), torch.add)
        out = x.new_empty(shape)
        work = _scatter_flat(out.view(-1), rows.view(-1), group=peers.group, async_op=True)
        return lambda: _after(work, out)

    return start


def _all_to_all(peers: Peers, static: Static) -> Start:
    split, concat, n = static["split_dim"], static["concat_dim"], len(peers)

    def start(x: Tensor) -> Callable[[], Tensor]:
        if peers.shared:
            return peers.shared.all_to_all(x, split, concat)
        parts = x.chunk(n, split)
        wait = _exchange(torch.stack(_in(parts, peers.inverse)), peers)
        return lambda: torch.cat(_in(wait().unbind(0), peers.places), concat)

    return start


def _in(parts: Sequence[Tensor], order: list[int] | None) -> list[Tensor]:
    return list(parts) if order is None else [parts[i] for i in order]


def _ppermute(peers: Peers, static: Static) -> Start:
    pairs = list(zip(static["perm"][::2], static["perm"][1::2], strict=True))
    source_of = {destination: source for source, destination in pairs}

    def start(x: Tensor) -> Callable[[], Tensor]:
        if peers.shared:
            return peers.shared.permute(x, source_of.get(peers.index), peers.index in source_of.values())
        x, out = x.contiguous(), x.new_zeros(x.shape)
        ops = []
        for source, destination in pairs:
            if source == destination == peers.index:
                out.copy_(x)
            elif source == peers.index:
                ops.append(dist.P2POp(dist.isend, x, peers.ranks[destination], peers.group))
            elif destination == peers.index:
                ops.append(dist.P2POp(dist.irecv, out, peers.ranks[source], peers.group))
        works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> Tensor:
            for work in works:
                work.wait()
            ops.clear()  # which held what is sent
            return out

        return wait

    return start


def _at_once(make: Callable[[Peers, Static], Callable[[Tensor], Tensor]]) -> Callable[[Peers, Static], Start]:
    """A movement of local values: there is nothing to wait for."""

    def bound(peers: Peers, static: Static) -> Start:
        run = make(peers, static)

        def start(x: Tensor) -> Callable[[], Tensor]:
            out = run(x)
            return lambda: out

        return start

    return bound


def _pscatter(peers: Peers, static: Static) -> Callable[[Tensor], Tensor]:
    # A copy even where a part lies in one piece: it outlives the whole, which may be written over.
    return lambda x: copied(_own_part(peers, static["dim"], x))


def _own_part(peers: Peers, dim: int, x: Tensor) -> Tensor:
    size = x.shape[dim] // len(peers)
    return x.narrow(dim, peers.index * size, size)


def _pad(peers: Peers, static: Static) -> Callable[[Tensor], Tensor]:
    dim = static["dim"]

    def run(x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[dim] *= len(peers)
        out = x.new_zeros(shape)
        out.narrow(dim, peers.index * x.shape[dim], x.shape[dim]).copy_(x)
        return out

    return run


def _keep_first(peers: Peers, static: Static) -> Callable[[Tensor], Tensor]:
    return copied if peers.index == 0 else lambda x: x.new_zeros(x.shape)


def _axis_index(peers: Peers, static: Static) -> Callable[..., Tensor]:
    # Made once: a tensor of a Python number waits for the device.
    position = torch.tensor(peers.index, device=static.get("device") or peers.device)

    def axis_index() -> Tensor:
        return position.clone()

    return axis_index


_COMMUNICATE = {name for name, c in COLLECTIVES.items() if c.communicates}

_START: dict[str, Callable[[Peers, Static], Start]] = {
    "psum": ft.partial(_all_reduce, name="psum"),
    "pmax": ft.partial(_all_reduce, name="pmax"),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pscatter": _at_once(_pscatter),
    "pad": _at_once(_pad),
    "keep_first": _at_once(_keep_first),
}
