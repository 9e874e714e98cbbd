"""What a typed collective is, the table of all of them, and the one place where they are applied and differentiated."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..errors import MeshError, RankError, RuleError, ShapeError, fail, message, nearest, raise_all
from ..mesh import Axes, Mesh, as_axes
from ..spec import Type

Static = dict[str, Any]
Executor = Callable[["Collective", Tensor | None, tuple[str, ...], int, Static], Tensor]

# A FRAGMENT, because other modules define operators that are no collectives in the same namespace.
LIBRARY = torch.library.Library("fx_feather", "FRAGMENT")
STATIC_TYPES = {"perm": "int[]"}

executor: Executor | None = None


@dataclass(frozen=True)
class Collective:
    """One typed collective: a value that can be printed, enumerated and tested.

    Attributes:
        name: its key in `COLLECTIVES`.
        type: the state of the operand and of the result on the axes, such as `"partial -> I"`.
        summary: one line, with NCCL's name.
        vjp: name of the collective that pulls a cotangent back; None when there is none.
        op: the operator that stands for it in a program; None when it is the identity in the forward.
        fake: shape function with the signature of `op`; its result is contiguous.
        reference: values of all ranks of one group, in index order, and the static arguments -> all results.
        bytes: (bytes of the local operand, ranks) -> bytes that a rank sends in a ring.
        static: names of the integer arguments of `op`, in order.
        divides: the static argument naming the dim whose size has to be a multiple of the ranks.
        reduces: True when it adds values of several ranks, so that its precision matters.
        vjp_static: the static arguments of `vjp`, from its own.
    """

    name: str
    type: str
    summary: str
    vjp: str | None
    op: OpOverload | None
    fake: Callable[..., Tensor]
    reference: Callable[..., list[Tensor]]
    bytes: Callable[[int, int], int]
    static: tuple[str, ...] = ()
    divides: str | None = None
    reduces: bool = False
    vjp_static: Callable[[Static], Static] = dict

    @property
    def communicates(self) -> bool:
        """Whether ranks send anything."""
        return self.bytes(1 << 20, 2) > 0

    @property
    def before(self) -> str:
        """State of the operand: V, I, R, partial, or "" when there is no operand."""
        return self.type.split("->")[0].strip()

    @property
    def after(self) -> str:
        """State of the result: V, I, R or partial."""
        return self.type.split("->")[1].strip()


COLLECTIVES: dict[str, Collective] = {}


def register(collective: Collective, *, shares: str | None = None, identity: bool = False) -> Collective:
    """Puts a collective into the table, with an operator of its own unless it shares one or is the identity."""
    op = None if identity else _define(collective) if shares is None else COLLECTIVES[shares].op
    collective = Collective(**{**collective.__dict__, "op": op})
    COLLECTIVES[collective.name] = collective
    return collective


def _define(collective: Collective) -> OpOverload:
    name, names = collective.name, collective.static
    extra = "".join(f", {STATIC_TYPES.get(k, 'int')} {k}" for k in names)
    LIBRARY.define(f"{name}(Tensor x, str axes, int n{extra}) -> Tensor")

    def kernel(x: Tensor, axes: str, n: int, *static: Any) -> Tensor:
        return execute(COLLECTIVES[name], x, axes, n, dict(zip(names, static, strict=True)))

    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fx_feather::{name}", collective.fake, lib=LIBRARY)
    op: OpOverload = getattr(torch.ops.fx_feather, name).default
    return op


def execute(collective: Collective, x: Tensor | None, axes: str, n: int, static: Static) -> Tensor:
    """Runs a collective on real values: by the executor of the moment, or alone when the group is one rank."""
    if executor is not None:
        return executor(collective, x, tuple(axes.split(",")), n, static).contiguous()
    if n == 1:
        alone = collective.reference([torch.empty(0) if x is None else x], **static)[0]
        return alone.clone(memory_format=torch.contiguous_format)
    fail(
        RankError,
        call=_call(collective.name, axes.split(","), n, static),
        got="no operand" if x is None else show(x),
        number=f"the group over axes {axes!r} has {n} ranks, and this is one process outside of any program",
        rule="a collective names a mesh axis; ranks are found only while a runtime runs the program it is part of",
        fix="run the program: step(state, batch) under torchrun, or step.simulate(state, batch) in this process",
    )


@contextlib.contextmanager
def executed_by(run: Executor) -> Iterator[None]:
    """Within the block, collectives on real values are run by `run(collective, x, axes, n, static)`.

    `x` is the local operand (None for `axis_index`), `axes` a tuple of names, `n` the ranks of the group, and the
    result is a new tensor. The hook is one for the whole process.
    """
    global executor
    before, executor = executor, run
    try:
        yield
    finally:
        executor = before


class Apply(torch.autograd.Function):
    """Any collective under autograd: its backward applies the collective that the table names as its vjp."""

    # Its inputs and context are plain values, and `setup_context` is apart: torch.func transforms ask for both.

    @staticmethod
    def forward(x: Tensor, name: str, axes: str, n: int, static: Static, grad_dtype: torch.dtype | None) -> Tensor:
        """The result of the operator, or a view for the identities."""
        collective = COLLECTIVES[name]
        if collective.op is None:
            return x.view_as(x)
        out: Tensor = collective.op(x, axes, n, *(static[k] for k in collective.static))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps all but the operand."""
        x, *ctx.rest = inputs
        ctx.dtype = x.dtype
        # An undefined cotangent stays undefined, so that one is never reduced only to add zero.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cts: Tensor | None) -> tuple[Tensor | None, None, None, None, None, None]:
        """The dual collective of the cotangent."""
        (ct,), (name, axes, n, static, grad_dtype) = cts, ctx.rest
        if ct is None:
            return None, None, None, None, None, None
        collective = COLLECTIVES[name]
        if collective.vjp is None:
            refuse_vjp(name, axes, n, static, ct)
        dual = COLLECTIVES[collective.vjp]
        if dual.reduces and grad_dtype is not None:
            ct = ct.to(grad_dtype)
        out = Apply.apply(ct, dual.name, axes, n, collective.vjp_static(static), grad_dtype)
        return out.to(ctx.dtype), None, None, None, None, None


def refuse_vjp(name: str, axes: str, n: int, static: Static, ct: Tensor) -> NoReturn:
    """Raises RuleError: a gradient flows through a collective that has no vjp."""
    fail(
        RuleError,
        call=_call(name, axes.split(","), n, static),
        got=f"a cotangent {show(ct)}",
        number=f"{name} has no vjp, and a gradient flows through it",
        rule=f"{name} is for values that take no gradient, such as the shift of a softmax",
        fix=f"detach its operand: {name}(x.detach(), ...)",
    )


def apply(
    name: str, x: Tensor, axes: Axes, n: int, static: Static | None = None, grad_dtype: torch.dtype | None = None
) -> Tensor:
    """Applies a collective of the table to the value of one rank, with its arguments checked.

    Raises:
        MeshError: axes that are no names, or no possible number of ranks.
        ShapeError: a dim that the operand does not have, or whose size is no multiple of the ranks.
    """
    collective, axes, static = find(name), as_axes(axes), dict(static or {})
    check_group(name, axes, n, static)
    static = checked_dims(collective, x, axes, n, static, _call(name, axes, n, static))
    out: Tensor = Apply.apply(x, name, ",".join(axes), n, static, grad_dtype)
    return out


def checked_dims(collective: Collective, x: Tensor, axes: Sequence[str], n: int, static: Static, call: str) -> Static:
    """The static arguments, with dims that are not negative.

    Raises:
        ShapeError: a dim that the operand does not have, or whose size is no multiple of the ranks.
    """
    static, rank, problems = dict(static), x.dim(), []
    for key in (k for k in static if k.endswith("dim")):
        if not isinstance(static[key], int) or not -rank <= static[key] < rank:
            problems.append(
                message(
                    call=call,
                    got=show(x),
                    number=f"{key} {static[key]!r} is not a dim of a tensor of {rank} dims",
                    rule="a collective joins or splits a dim that its operand has",
                    fix=f"{key} between {-rank} and {rank - 1}" if rank else "x.unsqueeze(0) gives the operand a dim",
                )
            )
        else:
            static[key] %= rank
    if not problems and collective.divides is not None:
        problems = _indivisible(call, x, axes, n, static[collective.divides])
    raise_all(ShapeError, problems)
    return static


def find(name: str) -> Collective:
    """The collective of that name; RuleError with the nearest names when there is none."""
    if name not in COLLECTIVES:
        fail(
            RuleError,
            call=f"{name}(...)",
            got=f"the name {name!r}",
            number=f"{name!r} is none of the {len(COLLECTIVES)} collectives",
            rule="a collective is a value registered in fx_feather.collectives",
            fix=nearest(name, list(COLLECTIVES)),
        )
    return COLLECTIVES[name]


def check_group(name: str, axes: Sequence[str], n: int, static: Static | None = None) -> None:
    """Raises MeshError unless `axes` are names, each once, and `n` is a possible number of ranks."""
    call, problems = _call(name, axes, n, static or {}), []
    if not axes or len(set(axes)) < len(axes) or not all(isinstance(a, str) and a.isidentifier() for a in axes):
        problems.append(
            message(
                call=call,
                got=f"axes {tuple(axes)!r}",
                number=f"{tuple(axes)!r} is not one or more different names of mesh axes",
                rule="a collective names the mesh axes it runs over, the major one first",
                fix=f'{name}(x, ("tp",), mesh["tp"], ...)',
            )
        )
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        problems.append(
            message(
                call=call,
                got=f"n = {n!r}",
                number=f"n is {n!r}, which is not a positive integer",
                rule="n is the number of ranks of one group, the product of the sizes of its axes",
                fix=f"n = mesh.count({tuple(axes)!r})",
            )
        )
    raise_all(MeshError, problems)


def _indivisible(call: str, x: Tensor, axes: Sequence[str], n: int, dim: int) -> list[str]:
    size = x.shape[dim]
    # A size that is known only at run time is not an int here; splitting it is checked when it is.
    if not isinstance(size, int) or size % n == 0:
        return []
    low = size // n * n
    return [
        message(
            call=call,
            got=f"{show(x)}, {n} ranks over {tuple(axes)!r}",
            number=f"dim {dim} has size {size}, and {size} = {size // n} * {n} + {size % n}",
            rule="every rank takes an equal part of the dim, so its size is a multiple of the ranks",
            fix=f"a size of {f'{low} or ' if low else ''}{low + n}, or pad dim {dim} by {low + n - size} with zeros",
        )
    ]


def lockstep(name: str, values: Sequence[Tensor], mesh: Mesh, axes: Axes, **static: Any) -> list[Tensor]:
    """Applies a collective's reference to the values of all ranks of a mesh, group by group.

    Args:
        name: key in `COLLECTIVES`.
        values: the operand of each rank, in rank order.
        mesh: the ranks.
        axes: the axes that a group spans, the major one first.
        static: the static arguments of the operator (`dim=`, `perm=` flattened, ...), dims not negative.

    Raises:
        MeshError: not one value a rank, or an axis that the mesh does not have.
        ShapeError: values in one group that differ in shape or dtype, or do not split.

    >>> lockstep("psum", [torch.tensor(1), torch.tensor(2)], Mesh(tp=2), "tp")
    [tensor(3), tensor(3)]
    """
    collective, axes = find(name), as_axes(axes)
    call = f"lockstep({name!r}, ..., {mesh!r}, {axes!r})"
    mesh.check(axes, call=call)
    check_group(name, axes, mesh.count(axes), static)
    if len(values) != mesh.size:
        fail(
            MeshError,
            call=call,
            got=f"{len(values)} values on {mesh!r}",
            number=f"{len(values)} values for {mesh.size} ranks",
            rule="each rank has one operand",
            fix="pass one tensor for every rank, in rank order",
        )
    out: dict[int, Tensor] = {}
    for ranks in mesh.groups(axes):
        operands = [values[r] for r in ranks]
        problems = [
            message(
                call=call,
                got=f"{show(v)} on rank {r}, {show(operands[0])} on rank {ranks[0]}",
                number=f"rank {r} differs from rank {ranks[0]}",
                rule="all ranks of a group bring operands of one shape and dtype",
                fix="pad the smaller ones with zeros at the end of the dim",
            )
            for r, v in zip(ranks, operands, strict=True)
            if v.shape != operands[0].shape or v.dtype != operands[0].dtype
        ]
        if not problems and collective.divides is not None:
            problems = _indivisible(call, operands[0], axes, len(ranks), static[collective.divides])
        raise_all(ShapeError, problems)
        out.update(zip(ranks, collective.reference(operands, **static), strict=True))
    return [out[r] for r in range(mesh.size)]


def free(local_bytes: int, n: int) -> int:
    """Bytes sent by what does not communicate."""
    return 0


def like(x: Tensor, *_: Any) -> Tensor:
    """The fake result of what keeps the shape: contiguous, whatever the strides of the operand are."""
    return x.new_empty(x.shape)


def resized(x: Tensor, dim: int, size: int) -> Tensor:
    """The fake result of what changes the size of one dim."""
    return x.new_empty([size if d == dim else s for d, s in enumerate(x.shape)])


def show(x: Tensor) -> str:
    """A local value in the one notation."""
    return repr(Type.whole(x))


def _call(name: str, axes: Sequence[str], n: int, static: Static) -> str:
    operand = "x, " if COLLECTIVES[name].before else ""
    return f"{name}({operand}{tuple(axes)!r}, n={n!r}{''.join(f', {k}={v!r}' for k, v in static.items())})"
