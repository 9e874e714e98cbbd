"""The runtime: binds mesh axes to process groups and runs a program as one rank of a `torch.distributed` world."""

import contextlib
import functools as ft
import hashlib
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from . import agreement, world
from .backend import Overwriting, Together, build, computes, consuming, overwriting, together
from .channel import Channel, connect
from .collectives import Collective
from .deferred import Pending, deferred, started, values
from .errors import MeshError, RankError, fail
from .heap import give_back, keep_freed
from .mesh import Mesh
from .program import BY_OP, Func, Instr, Section
from .reuse import held_alone
from .spec import Type, assemble
from .transport import Peers, bind
from .unbuffered import unbuffered

_groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
_channels: dict[dist.ProcessGroup, Channel | None] = {}
#: For a world in which this rank failed amid a section, why: its collectives don't meet those of the others any more.
_failed: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def _forget() -> None:
    _channels.clear()
    _groups.clear()


class Runtime:
    """One rank of a mesh: its process groups, one for each set of axes, and its device.

    Raises:
        MeshError: the world has another number of ranks than the mesh.
    """

    def __init__(self, mesh: Mesh, device: str, backend: str = "eager"):
        self.mesh = mesh
        self.backend = backend
        self.rank = int(os.environ.get("RANK", "0")) if world.in_world() else 0
        self.device_mesh: DeviceMesh | None = None
        self.device = torch.device(device)
        if self.device.type == "cpu":
            give_back()
            keep_freed()
        if world.in_world() and not dist.is_initialized():
            if device == "cuda":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            with self._peers("the start"):
                world.begin("nccl" if device == "cuda" else "gloo", _forget)
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size != mesh.size:
            fail(
                MeshError,
                call=f"run on {mesh!r}",
                got=f"{size} process{'es' if size > 1 else ''}",
                number=f"the mesh has {mesh.size} ranks, the world has {size}",
                rule="each rank of the mesh is one process",
                fix=f"torchrun --nproc-per-node {mesh.size} script.py, or simulate(...) for all ranks in one process",
            )
        if dist.is_initialized():
            world.pause_at_exit()
            self.rank = dist.get_rank()
            if device == "cuda":
                self.device = torch.device("cuda", torch.cuda.current_device())
            with self._peers("making process groups"):
                self.device_mesh = self._device_mesh() if mesh.axes else None
        self._bound: dict[Func, Callable[..., list[torch.Tensor]]] = {}
        self._deferred: dict[Func, Callable[..., Callable[[], list[torch.Tensor]]]] = {}
        self._overwriting: dict[Func, Overwriting] = {}
        self._together: dict[Func, Together] = {}
        #: Functions with a collective of many values.
        self._sending: set[Func] = set()
        #: By identity, what sections gave; what is gone by now is forgotten when there are too many.
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._too_many = 1000
        self._settled = False
        self._process = os.getpid()
        #: What tells its program from others in messages.
        self._program = ""

    def _device_mesh(self) -> DeviceMesh:
        # Made from groups: those that a DeviceMesh makes by itself wait for torch's half hour, not for `timeout`.
        ranks = torch.arange(self.mesh.size).reshape(self.mesh.shape)
        groups = [self.group((axis,)) for axis in self.mesh.axes]
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=self.mesh.axes)

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """The process group over some axes: one for each set of axes, whatever the number of layers."""
        key = tuple(tuple(sorted(g)) for g in self.mesh.groups(axes))
        if key == (tuple(range(dist.get_world_size())),):
            return dist.group.WORLD  # type: ignore[return-value]
        if key not in _groups:
            # Every rank makes every group, in the same order, as torch.distributed asks.
            made = [(g, dist.new_group(list(g), timeout=world.timeout())) for g in key]
            _groups[key] = next(p for g, p in made if self.rank in g)
        return _groups[key]

    def channel(self, group: dist.ProcessGroup) -> Channel | None:
        """Shared memory of a process group, where its ranks are on one machine and their values on its CPU."""
        if group not in _channels and self.device.type == "cpu":
            with self._peers("connecting ranks of one machine"):
                ranks = dist.get_process_group_ranks(group)
                everyone = ft.partial(self._everyone, group)
                _channels[group] = connect(ranks, dist.get_rank(group), everyone, world.timeout().total_seconds())
        return _channels.get(group)

    def _everyone(self, group: dist.ProcessGroup, data: bytes) -> list[bytes]:
        """What each rank of a group brought, bytes of one length, in the order of the group."""
        own = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8).to(self.device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own, group)
        return [x.cpu().numpy().tobytes()[: len(data)] for x in found]

    def everyone(self, doing: str) -> agreement.Everyone:
        """Gives what reaches all ranks of the mesh; in a world of one, that one."""
        if self.mesh.size == 1:
            return lambda data: [data]

        def give(data: bytes) -> list[bytes]:
            with self._turn(doing), self._peers(doing):
                return self._everyone(dist.group.WORLD, data)  # type: ignore[arg-type]

        return give

    def compare(self, text: str) -> None:
        """Raises RankError when ranks are about to run different programs, which would hang without a word."""
        if self.mesh.size > 1:
            self._program = hashlib.sha256(text.encode()).hexdigest()[:8]
            agreement.check_programs(text, self.mesh, self.everyone("comparing programs"))

    def scalar(self, x: float) -> torch.Tensor:
        """A number that this rank brings, float64[]."""
        return torch.tensor(x, dtype=torch.float64, device=self.device)

    def check_numbers(self, call: str, numbers: dict[str, int | None], axes: tuple[str, ...]) -> None:
        """Raises RankError for numbers that differ between the ranks along some axes, all of which call it."""
        group = self.group(axes)
        ranks = dist.get_process_group_ranks(group)

        def everyone(data: bytes) -> list[bytes]:
            with self._peers("comparing numbers of ranks"):
                return self._everyone(group, data)

        try:
            agreement.check_numbers(call, numbers, ranks, everyone)
        except RankError as e:
            # Ranks off these axes know nothing of it, and wait for the next collective.
            self._fail(e)
            raise

    def run(self, section: Section, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of a section on this rank.

        Raises:
            RankError: another rank failed, or this one did, in this section or an earlier one.
        """
        with self._turn(f"section {section.name!r} of program {self._program}"):
            return self._run(section, inputs) if self.mesh.size == 1 else self._run_as_one(section, inputs)

    def _turn(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return world.turn(f"rank {self.rank} of {self.mesh!r}", doing, self._process, self.mesh.size == 1)

    def _run_as_one(self, section: Section, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        everyone = dist.group.WORLD
        if everyone in _failed:
            fail(
                RankError,
                call=f"rank {self.rank} of {self.mesh!r}",
                got=f"section {section.name!r}",
                number=f"an earlier section failed on this rank: {_failed[everyone]}",
                rule="all ranks take part in every collective; where one left off is not where the others are",
                fix="start all ranks again; look at the first error",
            )
        try:
            return self._run(section, inputs)
        except BaseException as e:
            self._fail(e)
            raise

    def _fail(self, e: BaseException) -> None:
        """Ends this rank's part in the world: whoever waits for it fails at once."""
        why = _failed[dist.group.WORLD] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        for channel in _channels.values():
            if channel is not None:
                channel.close(why)

    def _run(self, section: Section, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        # What the program made may be written over once nobody needs it; what a user brought may not, nor views of it.
        foreign = {_memory(x) for x in inputs if not self._gave(x)}
        env: dict[int, torch.Tensor | Pending] = dict(zip(section.inputs, inputs, strict=True))
        inputs.clear()
        #: What a user brought and a collective of many sends, which would write over what nobody else holds.
        sent: list[torch.Tensor] = []

        def is_free(args: list[torch.Tensor], k: int) -> bool:
            return held_alone(args, k) and _is_own(args[k], foreign)

        def done(args: list[torch.Tensor], outs: Sequence[int], free: Sequence[int], made: list[torch.Tensor]) -> None:
            args.clear()
            env.update(zip(outs, made, strict=True))
            for v in free:
                env.pop(v, None)

        with torch.no_grad(), self._peers(f"section {section.name!r}"):
            for i in section.instrs:
                fn = self._callable(i)
                boxed = getattr(fn, "boxed", None)
                begin = self._deferred.get(i.func)
                form = self._overwriting.get(i.func)
                many = self._together.get(i.func)
                #: Operands, results and what is free after, of calls that run at once.
                waiting: list[tuple[list[torch.Tensor], tuple[int, ...], tuple[int, ...]]] = []
                for ins, outs, free in zip(i.ins, i.outs, i.free, strict=True):
                    args = values(env, ins)
                    for v in free:
                        env.pop(v, None)
                    if foreign and i.func in self._sending:
                        sent += [x for x in args if not _is_own(x, foreign)]
                    if begin is not None:
                        under_way = Pending(begin(*args), outs)
                        args.clear()
                        env.update(dict.fromkeys(set(outs).difference(free), under_way))
                        continue
                    over = form.free(ft.partial(is_free, args)) if form is not None else []
                    if many is not None and many.over.issubset(k for k in over if args[k].is_contiguous()):
                        waiting.append((args, outs, free))
                        continue
                    if form is not None and over:
                        made = form.run(args, over)
                    else:
                        made = boxed(args) if boxed is not None else fn(*args)
                    done(args, outs, free, made)
                    del made
                if many is not None and waiting:
                    for (args, outs, free), made in zip(waiting, many.run([w[0] for w in waiting]), strict=True):
                        done(args, outs, free, made)
                    del made
            outputs = values(env, section.outputs)
        if len(self._made) > self._too_many:
            self._made = {k: x for k, x in self._made.items() if x() is not None}
            self._too_many = 1000 + 2 * len(self._made)
        self._made.update((id(x), weakref.ref(x)) for x in outputs if _is_own(x, foreign))
        return outputs

    def _gave(self, x: torch.Tensor) -> bool:
        known = self._made.get(id(x))
        return known is not None and known() is x

    def settle(self) -> None:
        """Returns to the system what the first step alone needed; whoever takes steps calls it after each."""
        if not self._settled and self.device.type == "cpu":
            # State is where it stays only now: holes in the heap that the next steps don't fill would count as used.
            give_back()
        self._settled = True

    def item(self, x: torch.Tensor) -> Any:
        """A number that is the same on every rank."""
        return x.item()

    def numbers(self, x: torch.Tensor) -> list[Any]:
        """Numbers that are the same on every rank."""
        numbers: list[Any] = x.tolist()
        return numbers

    def gather(self, parts: Sequence[torch.Tensor], types: Sequence[Type]) -> list[torch.Tensor]:
        """Whole values, the same on every rank, from the local parts of all; every rank must call it."""
        if self.mesh.size == 1:
            return list(parts)
        out = []
        with self._turn("gathering whole values"), self._peers("gathering whole values"):
            for x, t in zip(parts, types, strict=True):
                everyone = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.mesh.size)]
                dist.all_gather(everyone, x.contiguous())
                out.append(assemble(everyone, t, self.mesh))
        return out

    def any(self, flags: Sequence[torch.Tensor]) -> list[bool]:
        """For each flag whether it is set on some rank."""
        if not flags:
            return []
        flat = torch.stack([f.to(torch.int32) for f in flags])
        if dist.is_initialized() and self.mesh.size > 1:
            with self._peers("looking for the leaf that is not finite"):
                dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        return [bool(f) for f in flat.tolist()]

    def _callable(self, instr: Instr) -> Callable[..., list[torch.Tensor]]:
        func = instr.func
        if func not in self._bound:
            graph = fx.Graph()
            graph.output(graph.graph_copy(func.graph, {}))
            for n in graph.nodes:
                if n.target in BY_OP:
                    n.target, n.args, n.kwargs = *self._bind(BY_OP[n.target], n), {}
            if unbuffered(graph):
                self._sending.add(func)
            # There is nothing to fuse where values are only moved, nor in what is one kernel already.
            form = overwriting(graph)
            eager = self.backend == "eager" or form is not None or not computes(graph)
            begin = deferred(graph, func.constants) if eager and func.can_wait() else None
            if begin is not None:
                self._deferred[func] = begin
            elif eager:
                started(graph)
            if begin is not None:
                self._bound[func] = lambda *xs: begin(*xs)()
            else:
                self._bound[func] = build(graph, func.constants, "eager" if eager else self.backend)
                if eager and form is None:
                    # Calls of a function are alike; whether one may write over an operand is asked each time.
                    form = consuming(graph, func.constants, instr.used_up())
            if form is not None:
                self._overwriting[func] = form
            at_once = together(graph) if eager and begin is None else None
            if at_once is not None and at_once.over.issubset(form.over if form is not None else ()):
                self._together[func] = at_once
        return self._bound[func]

    def _bind(self, c: Collective, n: fx.Node) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        at = 1 if c.before else 0
        axes, count = tuple(n.args[at].split(",")), n.args[at + 1]
        static = {**dict(zip(c.static, n.args[at + 2 :], strict=False)), **n.kwargs}
        operand = n.args[:at]
        group = self.group(axes) if count > 1 and c.communicates else None
        channel = self.channel(group) if group is not None else None
        peers = Peers(self.mesh.group(self.rank, axes), self.mesh.index(self.rank, axes), self.device, group, channel)
        return bind(c.name, peers, static), operand

    def _peers(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return world.peers(f"rank {self.rank} of {self.mesh!r}", doing)


def _memory(x: torch.Tensor) -> StorageWeakRef:
    # Not an address: what is allocated where something was freed would be taken for it.
    return StorageWeakRef(x.untyped_storage())


def _is_own(x: torch.Tensor, foreign: set[StorageWeakRef]) -> bool:
    return not foreign or _memory(x) not in foreign
