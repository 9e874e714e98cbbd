"""What compiled functions and compiled steps share: the types of what comes in, and the two ways to run."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import param, tree
from .agreement import Leaf, check_leaves, check_numbers
from .backend import BACKENDS
from .draws import LOSS, run_keys
from .effect import check_used
from .errors import BackendError, LayoutError, MeshError, OptionError, ShapeError, fail
from .explain import explain
from .inputs import batch_leaves, parameters
from .layout import Layout
from .mesh import Mesh
from .program import CollectiveNode, Program
from .runtime import Runtime
from .settings import OneOf, check, count
from .simulate import Simulator
from .spec import Type, assemble, pad_to, shard, slices
from .trace import trace
from .unit import GlobalProgram, avals
from .world import in_world

#: Leaves that an error shows; of more it says the number.
_LISTED = 8

#: Bytes of gradients that are reduced together, as in PyTorch's DistributedDataParallel.
BUCKET_BYTES = 25 << 20


def _device(device: str | None) -> str:
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def _check_device(device: Any) -> None:
    there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    # Told here: deep in a trace, a device that is not there may end the process.
    good = OneOf(there, none=True)
    rule = f"a program runs on {' or '.join(there)} here"
    check(
        BackendError, "compile", {"device": device}, [("device", good, rule, f"device={there[-1]!r}, or leave it out")]
    )


def _batch_dim(t: Type) -> int | None:
    return t.names.index("batch") if t.names and "batch" in t.names else None


def _check_kinds(mesh: Any, layout: Any) -> None:
    given = {"mesh": mesh, "layout": layout}
    if not isinstance(mesh, Mesh):
        fix = f"mesh=ff.Mesh(dp={mesh if isinstance(mesh, int) else 2})"
        check(MeshError, "compile", given, [("mesh", False, "ranks are named by the axes of a grid", fix)])
    if not isinstance(layout, Layout):
        fix = f"layout=layouts.{layout.__name__}(...)" if callable(layout) else 'ff.Layout(compute={"batch": "dp"})'
        check(LayoutError, "compile", given, [("layout", False, "a layout is a table of dim names and axes", fix)])


class Common:
    """What programs of any kind share: the mesh, the types of what comes in, and the two ways to run."""

    def __init__(
        self,
        template: Any,
        mesh: Mesh,
        layout: Layout,
        batch: Any,
        batch_dims: Any,
        device: str | None,
        microbatches: int,
        backend: str,
    ):
        check(
            BackendError,
            "compile",
            {"backend": backend},
            [("backend", OneOf(BACKENDS), f"the backends are {', '.join(BACKENDS)}", "backend='eager'")],
        )
        device = str(device) if isinstance(device, torch.device) else device
        _check_device(device)
        self.backend = backend
        _check_kinds(mesh, layout)
        self.mesh, self.layout, self.template, self.device = mesh, layout, template, _device(device)
        layout.check_axes(mesh)
        param.check_template(template, call="compile(..., template=...)")
        self.layout = layout = layout.fitted(mesh, [(p.dim_names, p.shape) for p in tree.leaves(template)])
        self.params = parameters(template, mesh, layout)
        self.batch = batch_leaves(batch, batch_dims, layout, mesh, microbatches)
        self.microbatches = microbatches
        self._local_shapes: dict[Type, tuple[int, ...]] = {}
        self._simulator: Simulator | None = None
        self._runtime: Runtime | None = None
        self.program: Program
        #: For each part of a program, the numbers of the calls in it that draw.
        self.drawn: dict[str, tuple[int, ...]] = {}

    def keys(self, part: str, step: int, microbatch: int = 0) -> list[torch.Tensor]:
        """What the calls of a part draw by: values for its last inputs."""
        calls, seed = self.drawn.get(part, ()), self.program.seed
        if not calls or seed is None:
            return []
        device = self.device if self._runtime is None else self._runtime.device
        return run_keys(seed, step, part, calls, microbatch, device)

    def sim_keys(self, part: str, step: int, microbatch: int = 0) -> list[list[torch.Tensor]]:
        """`keys`, the same for every rank."""
        return [[k] * self.mesh.size for k in self.keys(part, step, microbatch)]

    def trace(self, fn: Callable[..., Any], name: str) -> GlobalProgram:
        params = tree.unflatten(self.params.treedef, avals(self.params.in_use(), self.device))
        batch = tree.unflatten(self.batch.treedef, avals(self.batch.types, self.device))
        program = trace(fn, (params, batch), name)
        named = {n for p in tree.leaves(self.template) for n in p.dim_names}
        named |= {n for t in self.batch.types for n in t.names or ()} | program.dim_names()
        self.layout.check_dims(named)
        own = zip(self.params.paths, tree.leaves(self.template), strict=True)
        values = {n for t in self.batch.types for n in t.names or ()} | program.dim_names()
        check_used(self.layout, self.mesh, {path: p.dim_names for path, p in own}, values, program.manual_axes())
        return program

    def __repr__(self) -> str:
        found = self.collectives()
        sent = f"{len(found)} collectives that send {sum(c.sent_bytes for c in found):,} B a rank"
        return f"<{type(self).__name__} on {self.mesh!r}: {self.params!r}; {sent}>"

    @property
    def local(self) -> bool:
        """Whether this process is one rank of several, so that states hold local parts."""
        return in_world()

    def simulator(self) -> Simulator:
        self._simulator = self._simulator or Simulator(self.mesh)
        return self._simulator

    def runtime(self) -> Runtime:
        if self._runtime is None:
            self._runtime = Runtime(self.mesh, self.device, self.backend)
            self._runtime.compare(self.program.text(lines=False))
        return self._runtime

    def agree(self, call: str, numbers: dict[str, int | None], state: Sequence[Leaf], batch: Any) -> list[str]:
        """Raises an error where ranks hold other numbers, parts of a state or of a batch than they should in common.

        Returns:
            The paths of leaves of the state that are not finite on some rank.

        Raises:
            RankError: naming what differs, and the ranks.
        """
        run = self.runtime()
        everyone = run.everyone("comparing values")
        check_numbers(call, numbers, range(self.mesh.size), everyone)
        leaves = zip(self.batch.paths, tree.leaves(batch), self.batch.types, strict=True)
        held = [*state, *(Leaf(f"batch{path}", x, t) for path, x, t in leaves)]
        paths = {x.path for x in state}
        return [path for path in check_leaves(call, held, self.mesh, everyone) if path in paths]

    def shard(self, batch: Any) -> Any:
        """This rank's part of a whole batch, on its device.

        The whole batch is cut into microbatches first, so that each is the same rows in every layout; a rank has its
        part of the first, then of the second, and so on.

        Raises:
            BatchError: another structure, shape or dtype than the example's; all leaves at once.
        """
        leaves = self.batch.check(batch, [self._whole_shape(t) for t in self.batch.types], "shard(batch)")
        run = self.runtime()
        cut = [self._own(m, run.rank) for m in self._cut(leaves)]
        parts = []
        for i, t in enumerate(self.batch.types):
            at = _batch_dim(t)
            parts.append(cut[0][i] if at is None else torch.cat([m[i] for m in cut], at))
        return tree.unflatten(self.batch.treedef, [p.to(run.device) for p in parts])

    def from_local(self, batch: Any) -> Any:
        """This rank's part of a batch whose rows each rank brings for itself, so that no rank reads all of them.

        A leaf holds the rows (its dim `batch`) of this rank, and is whole in all other dims, of which this rank takes
        its own part. Ranks that differ only on axes that don't split the rows bring the same rows: with
        `Mesh(dp=2, tp=2)` and a batch split over dp, `mesh.coords(rank)["dp"]` says which. The global batch is made of
        the rows of all, each microbatch of an equal share of each rank's.

        Raises:
            BatchError: another structure, shape or dtype than the example's with that many rows; all leaves at once.
        """
        types = [t.with_(shape=self._whole_shape(t)) for t in self.batch.types]
        rows = [t.with_(dims=tuple(a if i == _batch_dim(t) else () for i, a in enumerate(t.dims))) for t in types]
        leaves = self.batch.check(batch, [t.local_shape(self.mesh) for t in rows], "from_local(batch)")
        run, parts = self.runtime(), []
        for x, t in zip(leaves, types, strict=True):
            at = _batch_dim(t)
            rest = t.with_(shape=tuple(x.shape), dims=tuple(() if i == at else a for i, a in enumerate(t.dims)))
            parts.append(shard(x, rest, self.mesh, run.rank).to(run.device))
        return tree.unflatten(self.batch.treedef, parts)

    def _own(self, microbatch: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        return [shard(x, t, self.mesh, rank) for x, t in zip(microbatch, self.batch.types, strict=True)]

    def shard_params(self, params: Any) -> Any:
        """This rank's part of whole parameters, as they rest, on its device.

        Raises:
            ShapeError: another structure, shape or dtype than the template's; all leaves at once.
        """
        leaves = self.whole_params(params, "shard_params(params)")
        return tree.unflatten(self.params.treedef, self.own_parts(leaves, self.params.at_rest()))

    def own_parts(self, values: Sequence[torch.Tensor], types: Sequence[Type]) -> list[torch.Tensor]:
        """Copies of this rank's parts of whole values."""
        run = self.runtime()
        return [shard(x, t, self.mesh, run.rank).to(run.device, copy=True) for x, t in zip(values, types, strict=True)]

    def _whole_shape(self, t: Type) -> tuple[int, ...]:
        at = _batch_dim(t)
        return tuple(n * (self.microbatches if i == at else 1) for i, n in enumerate(t.shape))

    def local_microbatches(self, batch: Any, call: str, step: int = 0) -> list[list[torch.Tensor]]:
        """For each microbatch its leaves, and the keys that its calls draw by."""
        whole = [self._whole_shape(t) for t in self.batch.types]
        shapes = [t.with_(shape=n).local_shape(self.mesh) for t, n in zip(self.batch.types, whole, strict=True)]
        cut = self._cut(self.batch.check(batch, shapes, call, whole))
        return [[*m, *self.keys(LOSS, step, k)] for k, m in enumerate(cut)]

    def _cut(self, leaves: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The microbatches of a batch, leaf by leaf along the batch dim."""
        k = self.microbatches
        out: list[list[torch.Tensor]] = [[] for _ in range(k)]
        for x, t in zip(leaves, self.batch.types, strict=True):
            at = _batch_dim(t)
            for i, part in enumerate([x] * k if at is None else x.chunk(k, at)):
                out[i].append(part.contiguous())
        return out

    def sim_microbatches(self, batch: Any, call: str, step: int = 0) -> list[list[list[torch.Tensor]]]:
        """For each microbatch and leaf, and each key that its calls draw by, the local part of every rank."""
        leaves = self.batch.check(batch, [self._whole_shape(t) for t in self.batch.types], call)
        cut = self._cut([x.to(self.device) for x in leaves])
        parts = [zip(*(self._own(m, r) for r in range(self.mesh.size)), strict=True) for m in cut]
        return [[*map(list, m), *self.sim_keys(LOSS, step, k)] for k, m in enumerate(parts)]

    def scatter(self, values: Sequence[torch.Tensor], types: Sequence[Type]) -> list[list[torch.Tensor]]:
        return [
            [shard(x.to(self.device), t, self.mesh, r) for r in range(self.mesh.size)]
            for x, t in zip(values, types, strict=True)
        ]

    def gather(self, values: Sequence[list[torch.Tensor]], types: Sequence[Type]) -> list[torch.Tensor]:
        return [assemble(v, t, self.mesh) for v, t in zip(values, types, strict=True)]

    def _check_params(self, params: Any, whole: bool, call: str) -> list[torch.Tensor]:
        tree.check_same(self.params.treedef, params, call=call, name="params")
        leaves = tree.leaves(params)
        self.check_leaves(leaves, self.params.at_rest(), "params", self.params.treedef, whole, call)
        return leaves

    def check_leaves(
        self, leaves: Sequence[Any], types: Sequence[Type], name: str, treedef: Any, whole: bool, call: str
    ) -> None:
        """Raises ShapeError for leaves that are no tensors of their types, whole or local, all at once."""
        shapes = [t.shape if whole else self._local_shape(t) for t in types]
        wrong = [
            i
            for i, (x, t, shape) in enumerate(zip(leaves, types, shapes, strict=True))
            if not isinstance(x, torch.Tensor) or x.shape != shape or x.dtype != t.dtype
        ]
        if not wrong:
            return
        paths = tree.paths_of(treedef)
        other = [t.local_shape(self.mesh) if whole else t.shape for t in types]
        turned = all(isinstance(leaves[i], torch.Tensor) and tuple(leaves[i].shape) == other[i] for i in wrong)
        mend = "step.whole(state)" if whole else "step.shard_state(state), or step.shard_params(params)"
        lines = [
            f"{name}{paths[i]} is {Type.whole(leaves[i]) if isinstance(leaves[i], torch.Tensor) else leaves[i]!r:.60}, "
            f"not {Type(types[i].dtype, tuple(shapes[i]), ((),) * len(shapes[i]))}"
            for i in wrong[:_LISTED]
        ]
        if len(wrong) > _LISTED:
            lines.append(f"and {len(wrong) - _LISTED} more")
        fail(
            ShapeError,
            call=f"{call}, {name}{paths[wrong[0]]}" + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
            got=f"{len(leaves) - len(wrong)} of {len(leaves)} leaves as they should be",
            number="\n".join(lines),
            rule="values are like the template's: local parts in a run, whole in simulate",
            fix=mend if turned and types else "values from init, or parts made by step.shard_state(state)",
        )

    def _local_shape(self, t: Type) -> tuple[int, ...]:
        # Asked of every leaf in every step.
        if t not in self._local_shapes:
            self._local_shapes[t] = t.local_shape(self.mesh)
        return self._local_shapes[t]

    def local_params(self, params: Any, call: str) -> list[torch.Tensor]:
        return self._check_params(params, False, call)

    def whole_params(self, params: Any, call: str) -> list[torch.Tensor]:
        return self._check_params(params, True, call)

    def init_params(self, seed: int = 0) -> Any:
        """Initial parameters: this rank's local parts in a run on several ranks, whole values otherwise.

        Values are a function of path and global index alone: the same bits in every layout.
        """
        fix = "seed=0; dataclasses.replace(step.init(), params=params) starts from parameters that are there"
        check(OptionError, "init", {"seed": seed}, [("seed", count(-(1 << 63)), "a seed is an integer", fix)])
        if not in_world():
            return tree.map(lambda x: x.to(self.device), param.init(self.template, seed))
        run, leaves = self.runtime(), []
        for p, path, t in zip(tree.leaves(self.template), self.params.paths, self.params.at_rest(), strict=True):
            part = param.initial_values(p, path, seed, slices(t, self.mesh, run.rank))
            leaves.append(pad_to(part, t.local_shape(self.mesh)).contiguous().to(run.device))
        return tree.unflatten(self.params.treedef, leaves)

    def explain(self) -> str:
        """The program by section and block: calls, operators, collectives and the bytes that a rank sends."""
        return explain(self.program)

    def collectives(self) -> list[CollectiveNode]:
        """The collectives of one call, in order."""
        return self.program.collectives()
