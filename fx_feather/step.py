"""Training steps: loss, gradients, clipping and update of one global batch as one program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from . import garbage, tree
from .advance import Advance
from .agreement import Leaf
from .compiled import BUCKET_BYTES, Common
from .draws import INIT, LOSS, UPDATE
from .errors import AmbiguousError, OptionError, StateError, fail
from .finite import refuse_state
from .layout import Layout, check_rest
from .mesh import Mesh
from .optim import Transform
from .passes.differentiate import REMAT
from .passes.draws import place_draws
from .passes.fuse import fuse
from .passes.interleave import interleave
from .passes.matmul import MATMULS, by_onednn, check_matmul
from .passes.overlap import overlap
from .passes.stitch import Funcs, Stitcher
from .passes.training import gradient_sections, loss_function, optimizer_sections
from .program import CollectiveNode, Program
from .settings import OneOf, check, count, known_options
from .state import Split, State


@dataclasses.dataclass(frozen=True)
class Options:
    """The settings of `compile_step` that change how a step is computed, and not what."""

    accumulate: int
    device: str | None
    remat: str | int
    reshard: bool
    bucket_bytes: int
    prefetch_bytes: int | None
    matmul: str
    backend: str
    check_every: int
    seed: int


class Step(Common):
    """A training step compiled for a mesh and a layout; made by `compile_step`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: Transform,
        template: Any,
        mesh: Mesh,
        layout: Layout,
        batch: Any,
        batch_dims: Any,
        adjust: Callable[[Any, Any], Any] | None,
        options: "Options",
    ):
        accumulate, bucket = options.accumulate, options.bucket_bytes
        super().__init__(template, mesh, layout, batch, batch_dims, options.device, accumulate, options.backend)
        if optimizer.frozen is not None:
            self.params.frozen = optimizer.frozen(template)
        check_matmul(options.matmul, self.device)
        s = Stitcher(Funcs(mesh, self.layout, self.device, options.remat))
        wrapped = loss_function(loss_fn)
        program = self.trace(wrapped, "loss")
        place_draws(program, self.params.in_use(), self.batch.types, accumulate)
        self._aux_tree = wrapped.aux_tree  # type: ignore[attr-defined]
        types = self.batch.types
        g = gradient_sections(s, program, self.params, types, options.reshard, bucket, accumulate, tokens=True)
        self._result_types = g.finish.out_types()[len(self.params.types) : len(g.first.outputs)]
        try:
            u = optimizer_sections(
                s, optimizer, self.params, g.finish.outputs[: len(g.first.outputs)], bucket, self._adjusting(adjust)
            )
        except AmbiguousError:
            # Operators of an update aren't the user's own: where the layout is to blame, it is named.
            paths = (f"params{path}" for path in self.params.paths)
            check_rest(zip(paths, self.params.types, strict=True))
            raise
        self._state_types, self._state_tree = u.state_types, u.state_tree
        self._check_every, self._calls = options.check_every, 0
        self._split = Split(mesh, (*self.params.at_rest(), *u.state_types))
        self.drawn = {LOSS: program.drawn, **u.drawn}
        sections = {"init": u.init, "first": g.first}
        sections |= {"following": g.following} if g.following is not None else {}
        sections |= {"finish": g.finish, "check": u.check, "update": u.update}
        for section in sections.values():
            fuse(section)
            overlap(section, options.prefetch_bytes)
            section.donate()
        self.program = Program(mesh, sections, options.seed if any(self.drawn.values()) else None)
        self._advance = Advance(self.program, u, self.params, self._aux_tree, adjust is not None, g.compared)
        for func in self.program.funcs():
            interleave(func.graph)
            if options.matmul == "onednn":
                by_onednn(func.graph)

    def _adjusting(self, adjust: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any] | None:
        if adjust is None:
            return None
        if self._aux_tree is None:
            fail(
                OptionError,
                call="compile_step(..., adjust=...)",
                got="a loss that returns (sum, count)",
                number="there are no auxiliary values to adjust by",
                rule="adjust takes the updated parameters and the auxiliary values of the whole batch",
                fix="return (sum, count, aux) from the loss",
            )

        def adjusted(params: Any, leaves: Any) -> Any:
            out = adjust(params, tree.unflatten(self._aux_tree, leaves))
            tree.check_same(self.params.treedef, out, call="adjust(params, aux)", name="the result")
            return out

        return adjusted

    def init(self, seed: int = 0) -> State:
        """Initial parameters and optimizer state.

        In a run on several ranks each holds its own local part; elsewhere the values are whole, for `simulate`.
        """
        params = self.init_params(seed)
        section = self.program.sections["init"]
        if self.local:
            opt = self.runtime().run(section, [*tree.leaves(params), *self.keys(INIT, 0)])
        else:
            values = self.scatter(tree.leaves(params), self.params.at_rest())
            opt = self.gather(self.simulator().run(section, [*values, *self.sim_keys(INIT, 0)]), self._state_types)
        return State(params, tree.unflatten(self._state_tree, opt), 0, not self.local, self._own_split(), seed)

    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        """Takes one step on this rank.

        Args:
            state: from `init` or the step before; it is taken over and can't be used again.
            batch: this rank's part of the batch, as `shard` makes it.

        Returns:
            The new state, and metrics: `loss` (sum / count over the whole global batch), `count`, `grad_norm` (global,
            before clipping) as Python numbers, and `aux` if the loss has any.

        Raises:
            NonFiniteError: the loss or a gradient is not finite. The step is not applied and the state stays usable.
            StateError: a state that was taken over already.
            BatchError: a batch that is not like the example.
        """
        call, run = "step(state, batch)", self.runtime()
        opt = self._opt_leaves(state, call)
        microbatches = self.local_microbatches(batch, call, state.step)
        # No name but the state's own may hold the old parameters, or they would outlive their update.
        leaves, keys = self.local_params(state.params, call), self.keys(UPDATE, state.step)
        if self._check_every and self._calls % self._check_every == 0:
            # Counted in calls, not in steps: ranks of different steps must come here together.
            self._compare(call, state, [*leaves, *opt], batch)
        self._calls += 1
        new, metrics = self._advance(state, leaves, opt, keys, microbatches, run)
        run.settle()
        return self._state(new, state), metrics

    def simulate(self, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        """Takes one step with all ranks in this process: whole state and batch in, whole results out.

        It runs each rank's program, collective by collective in lockstep. Nothing is taken over: `state` stays usable.
        """
        call = "simulate(state, batch)"
        opt = self._opt_leaves(state, call)
        sim = self.simulator()
        leaves = self.scatter(self.whole_params(state.params, call), self.params.at_rest())
        moments = self.scatter(opt, self._state_types)
        microbatches, keys = self.sim_microbatches(batch, call, state.step), self.sim_keys(UPDATE, state.step)
        new, metrics = self._advance(dataclasses.replace(state), leaves, moments, keys, microbatches, sim)
        whole = self.gather(new, [*self.params.at_rest(), *self._state_types])
        if self._aux_tree is not None:
            # Each leaf is a list here, one value a rank, so that the structure says where a leaf begins.
            aux = self.gather(self._aux_tree.flatten_up_to(metrics["aux"]), self._result_types[2:])
            metrics["aux"] = tree.unflatten(self._aux_tree, aux)
        return self._state(whole, state), metrics

    def run_whole(self, state: State, batch: Any) -> tuple[State, dict[str, Any]]:
        """Takes one step wherever this process is: a whole batch in, and whole results out, the same on every rank.

        Under torchrun each rank takes its own part of what comes in, and the results are gathered; in one process all
        ranks are simulated. It is for looking at results and comparing them: every rank must call it, and each then
        holds all values. A training loop calls the step itself, whose state stays split.

        Args:
            state: from `init`, or from here; nothing is taken over, and it can be used again.
            batch: the whole batch.
        """
        if not self.local:
            return self.simulate(state, batch)
        opt = self._opt_leaves(state, "run_whole(state, batch)")
        if state.whole:
            params, opt = self.shard_params(state.params), self.own_parts(opt, self._state_types)
        else:
            params, opt = tree.map(torch.clone, state.params), [x.clone() for x in opt]
        own = State(params, tree.unflatten(self._state_tree, opt), state.step, False, self._split, state.seed)
        new, metrics = self(own, self.shard(batch))
        if self._aux_tree is not None:
            aux = self.runtime().gather(tree.leaves(metrics["aux"]), self._result_types[2:])
            metrics["aux"] = tree.unflatten(self._aux_tree, aux)
        return self.whole(new), metrics

    def whole(self, state: State) -> State:
        """The state in whole values, the same on every rank, from the local parts that the ranks hold.

        It is for looking at states and comparing them: every rank must call it, and each then holds all values.
        """
        opt = self._opt_leaves(state, "whole(state)")
        if state.whole:
            return state
        values = self.runtime().gather([*tree.leaves(state.params), *opt], [*self.params.at_rest(), *self._state_types])
        return dataclasses.replace(self._state(values, state), step=state.step, whole=True, split=None)

    def shard_state(self, state: State) -> State:
        """This rank's part of a whole state, such as `whole` gives, for the step to go on with.

        It is how a state changes its mesh or layout: `new.shard_state(old.whole(state))`. Nothing is taken over. In one
        process, whose states are whole, it gives the state as it is.

        Raises:
            StateError: a state that was taken over already, or one in local parts.
            ShapeError: another structure, shape or dtype than the template's.
        """
        call = "shard_state(state)"
        opt = self._opt_leaves(state, call)
        if not state.whole:
            fail(
                StateError,
                call=call,
                got=repr(state),
                number="its values are local parts already",
                rule="what is cut into parts is a whole state",
                fix="step.shard_state(other.whole(state)), where `other` is the step that made the state",
            )
        if not self.local:
            return state
        params = self.shard_params(state.params)
        own = tree.unflatten(self._state_tree, self.own_parts(opt, self._state_types))
        return State(params, own, state.step, False, self._split, state.seed)

    def _compare(self, call: str, state: State, leaves: list[torch.Tensor], batch: Any) -> None:
        held = zip(self._advance.leaf_paths(), leaves, self._split.types, strict=True)
        numbers = {"step": state.step, "seed": state.seed}
        refuse_state(call, self.agree(call, numbers, [Leaf(*x) for x in held], batch))

    def _own_split(self) -> Split | None:
        return self._split if self.local else None

    def _state(self, leaves: list[torch.Tensor], before: State) -> State:
        n = len(self.params.types)
        params = tree.unflatten(self.params.treedef, leaves[:n])
        opt = tree.unflatten(self._state_tree, leaves[n:])
        return State(params, opt, before.step + 1, before.whole, None if before.whole else self._split, before.seed)

    def _opt_leaves(self, state: State, call: str) -> list[Any]:
        if not isinstance(state, State):
            fail(
                StateError,
                call=call,
                got=f"a {type(state).__name__} in the place of the state",
                number=f"{type(state).__name__} is not a State",
                rule="a step takes the state first, then the batch",
                fix="state = step.init(seed=0), and then the state that each step returns",
            )
        state.check(call, self._split, self._advance.leaf_paths)
        tree.check_same(self._state_tree, state.opt, call=call, name="state.opt")
        leaves = tree.leaves(state.opt)
        self.check_leaves(leaves, self._state_types, "state.opt", self._state_tree, state.whole, call)
        return leaves

    def collectives(self) -> list[CollectiveNode]:
        """The collectives of one step, in order, each microbatch counted."""
        p = self.program
        following = p.collectives("following") * (self.microbatches - 1) if self.microbatches > 1 else []
        rest = [c for name in ("finish", "check", "update") for c in p.collectives(name)]
        return [*p.collectives("first"), *following, *rest]


_BUDGET_RULE = "a budget is a number of bytes, 0 for none"
_REMAT_RULE = "what to compute again is 'none', 'selective', 'full', or all that does not fit into a number of bytes"


@known_options
@garbage.kept()
def compile_step(
    loss_fn: Callable[..., Any],
    optimizer: Transform,
    *,
    template: Any,
    mesh: Mesh,
    layout: Layout,
    batch: Any,
    batch_dims: Any = None,
    accumulate: int = 1,
    device: str | None = None,
    remat: str | int = "none",
    reshard: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    prefetch_bytes: int | None = None,
    matmul: str = "aten",
    backend: str = "eager",
    check_every: int = 500,
    seed: int = 0,
    adjust: Callable[[Any, Any], Any] | None = None,
) -> Step:
    """Compiles a training step for a mesh and a layout.

    The gradient is that of total sum / total count over the whole global batch, whatever the layout, the number of
    microbatches and the share of padding on each rank.

    Args:
        loss_fn: `(params, batch) -> (sum, count)` or `(sum, count, aux)`; aux is a pytree of tensors that are added up
            over microbatches.
        optimizer: a pure (init, update) pair such as `adamw(...)`.
        template: pytree of `Param`.
        mesh: the ranks.
        layout: how values, parameters, gradients and optimizer state are split.
        batch: an example of a whole global batch; only shapes and dtypes matter.
        batch_dims: dim names of the batch's leaves; by default "batch seq" and further dims without a name.
        accumulate: equal microbatches that a batch is processed in, the same rows in every layout. Gradients are
            reduced once a step, but for those that the layout stores split, which are reduce-scattered once a
            microbatch. The sums and counts of microbatches are added: a term of the sum that does not depend on the
            batch counts once for each.
        device: `cpu` or `cuda`; CUDA by default where there is any.
        remat: `none` keeps what the backward needs; `selective` the results of matmuls, attention and collectives, and
            computes the rest again; `full` keeps the inputs of each block alone. A number is a budget: the bytes that
            a rank may keep of a microbatch beside the inputs of blocks, for which each block keeps what fits its share.
        reshard: free gathered parameters after the forward and gather them again for the backward.
        bucket_bytes: bytes of gradients that are reduced together, at most (one larger parameter travels alone).
        prefetch_bytes: bytes of gathered parameters that may wait for their use, so that their gather runs while other
            blocks are computed; by default those of the largest gather, which keeps one block ahead.
        matmul: `aten` multiplies matrices as `torch.mm` does; `onednn` large ones in float32 on CPUs by oneDNN, which
            may be faster there (`faster_matmul` measures it), with results that are close but not the same bits.
        backend: `eager` runs operator by operator; `inductor` fuses them, each distinct block compiled once, with
            results that are close but not the same bits.
        check_every: calls after which ranks compare what they should hold in common, the first call included: the bits
            of state and batch where the layout doesn't split them, the seed and the number of the step; 0 for never.
            It reads the state once, of a leaf 16 MB at most. That all are at the same step is seen in every step, along
            the axes over which the loss is summed.
        seed: what dropout, `torch.rand` and their like draw by, with the number of the step: the same bits in every
            layout, for any `accumulate`. `ff.random.seeded` gives them to the plain function on one device.
        adjust: a pure function `(params, aux) -> params`, part of the update after the optimizer's: for what moves by
            statistics of the whole batch and not by a gradient, such as the bias of a router.

    Raises:
        FeatherError: whatever of the settings do not fit together, all offenders at once.

    >>> import fx_feather as ff
    >>> template = {"w": ff.Param("embed", (4,))}
    >>> def loss(params, batch):
    ...     return ((batch @ params["w"] - 1) ** 2).sum(), torch.tensor(batch.shape[0])
    >>> layout = ff.Layout(compute={"batch": "dp"})
    >>> step = ff.compile_step(loss, ff.sgd(lr=0.1), template=template, mesh=ff.Mesh(dp=2), layout=layout,
    ...                        batch=torch.ones(4, 4), batch_dims="batch embed")
    >>> state, metrics = step.simulate(step.init(seed=0), torch.ones(4, 4))
    >>> state.step, metrics["count"]
    (1, 4)
    """
    options = Options(
        accumulate, device, remat, reshard, bucket_bytes, prefetch_bytes, matmul, backend, check_every, seed
    )
    settings = {"optimizer": optimizer, **dataclasses.asdict(options)}
    is_pair = isinstance(optimizer, Transform)
    check(
        OptionError,
        "compile_step",
        settings,
        [
            ("optimizer", is_pair, "an optimizer is a pair (init, update)", "a call such as ff.adamw(lr=3e-4)"),
            ("accumulate", count(1), "a batch is processed in one microbatch or more", "accumulate=1"),
            ("remat", OneOf(REMAT, numbers=0), _REMAT_RULE, "remat='none'"),
            ("reshard", lambda x: isinstance(x, bool), "parameters are gathered again, or not", "reshard=True"),
            ("bucket_bytes", count(1), "a bucket holds at least one byte", "bucket_bytes=25 << 20"),
            ("prefetch_bytes", count(0, none=True), _BUDGET_RULE, "prefetch_bytes=1 << 30"),
            ("seed", count(-(1 << 63)), "a seed is any integer", "seed=0"),
            ("check_every", count(0), "ranks compare what they hold every so many calls", "check_every=500"),
            ("matmul", OneOf(MATMULS), f"the ways are {', '.join(MATMULS)}", "matmul='aten'"),
        ],
    )
    return Step(loss_fn, optimizer, template, mesh, layout, batch, batch_dims, adjust, options)
