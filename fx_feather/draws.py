"""Draws: torch's own random operators, as functions of a key and of the number of the draw."""

import contextlib
import dataclasses
import functools as ft
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import kernels as kernels  # defines the operator of draws
from . import tree
from .errors import FeatherError, fail
from .kernels.random import fold_in, signed
from .random_ops import arguments, draws, is_random, may_draw, name_of, value
from .source import this_line, user_line

#: What draws: parts of a program that have numbers of their own.
LOSS, INIT, UPDATE = "loss", "optimizer.init", "optimizer"
_PARTS = (LOSS, INIT, UPDATE)

#: Gives what stands for the key of what is traced, int64[2]; None if that is to be an input of its own.
Key = Callable[[], Tensor | None]

_draw = torch.ops.fx_feather.draw.default


def run_keys(
    seed: int, step: int, part: str, calls: Sequence[int], microbatch: int = 0, device: Any = None
) -> list[Tensor]:
    """For each number of a call what its draws go by, int64[2]: a key, and the number of the microbatch.

    Call 0 is what stands outside of blocks; the n-th call of a block that draws has number n.
    """
    base = fold_in(fold_in(fold_in(signed(seed), _PARTS.index(part)), step), 0)
    keys = [[signed(fold_in(base, n)), microbatch] for n in calls]
    # A transform of torch.func would wrap them where it is at work.
    with temporarily_clear_interpreter_stack():
        return list(torch.tensor(keys, dtype=torch.int64, device=device).unbind()) if keys else []


@dataclasses.dataclass
class Site:
    """Draws of one call of a block, or of what is outside: they are numbered in the order in which they are made.

    Attributes:
        find: gives what they go by, int64[2]; called at the first draw, since calls that don't draw have no number.
        count: draws so far; those by keys of their own have no number.
        drawn: whether there was any.
    """

    find: Callable[[], Tensor]
    count: int = 0
    drawn: bool = False

    @ft.cached_property
    def run(self) -> Tensor:
        self.drawn = True
        return self.find()

    def draw(
        self,
        kind: str,
        args: Sequence[float],
        like: Tensor | None = None,
        size: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The next draw, shaped like a tensor, or of a size."""
        shape = list(like.shape if like is not None else size or [])
        if dtype is None:
            dtype = like.dtype if like is not None else torch.get_default_dtype()
        number, self.count = self.count, self.count + 1
        device = self.run.device if like is None else like.device
        run = self.run if self.run.device == device else self.run.to(device)
        return _draw(run, None, like, [], [], shape, shape, number, kind, list(args), dtype, -1, 1)


class Drawing(TorchDispatchMode):
    """Within it torch's random operators draw by a key."""

    def __init__(self, site: Site):
        super().__init__()
        self.site = site

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _draw and not self.site.drawn:
            _ = self.site.run
        a = arguments(func, args, kwargs) if is_random(func) else None
        if a is None or not draws(func, a):
            return func(*args, **kwargs)
        out = value(func, a, self.site.draw, this_line())
        return a["self"].copy_(out) if name_of(func).endswith("_") else out


@dataclasses.dataclass
class _Plain:
    """A plain run under `seeded`: the keys of its calls, and how many of those of blocks drew."""

    seed: int
    step: int
    part: str
    calls: int = 0
    inside: bool = False


_plain: _Plain | None = None


@contextlib.contextmanager
def seeded(seed: int = 0, step: int = 0, part: str = LOSS) -> Iterator[None]:
    """Within it a plain function on one device draws what a compiled step does: its specification, bit for bit.

    Args:
        seed: as given to `compile_step`.
        step: the number of the step, 0 for the first.
        part: `loss`, `optimizer.init` or `optimizer`, which draw numbers of their own.

    Raises:
        FeatherError: another part.

    >>> with seeded(0):
    ...     a = torch.rand(3)
    >>> with seeded(0):
    ...     torch.equal(a, torch.rand(3))
    True
    """
    global _plain
    if part not in _PARTS:
        fail(
            FeatherError,
            call=f"seeded({seed!r}, {step!r}, {part!r})",
            got=f"part={part!r}",
            number=f"{part!r} is not a part of a step",
            rule=f"the parts of a step are {', '.join(_PARTS)}",
            fix='part="loss"',
        )
    before, _plain = _plain, _Plain(seed, step, part)
    try:
        with Drawing(Site(lambda: run_keys(seed, step, part, [0])[0])):
            yield
    finally:
        _plain = before


@contextlib.contextmanager
def no_plain_run() -> Iterator[None]:
    """Within it `seeded` is as if it were not there: what is traced draws by keys of its own."""
    global _plain
    if _plain is None:
        yield
        return
    before, _plain = _plain, None
    try:
        with _disable_current_modes():
            yield
    finally:
        _plain = before


def plain_call(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls the function of a block, whose draws have numbers of their own under `seeded`."""
    now = _plain
    if now is None or now.inside:
        return fn(*args)

    def find() -> Tensor:
        now.calls += 1
        return run_keys(now.seed, now.step, now.part, [now.calls])[0]

    now.inside = True
    try:
        with Drawing(Site(find)):
            return fn(*args)
    finally:
        now.inside = False


def lower_graph(gm: fx.GraphModule, key: Key) -> bool:
    """Puts draws by a key in the place of torch's random operators; whether there are any.

    Args:
        gm: as traced. Its random operators are numbered in the order of its graph.
        key: what stands for the call's key and microbatch, int64[2], in a constant of the graph; None for a last input.
    """
    graph = gm.graph
    site: Site | None = None
    node: fx.Node | None = None
    for n in list(graph.nodes):
        if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
            continue
        explicit = n.target is _draw and n.args[0] is None
        if not explicit and not may_draw(n.target):
            continue
        leaves, treedef = tree.flatten((list(n.args), dict(n.kwargs)))
        at = [i for i, x in enumerate(leaves) if isinstance(x, fx.Node)]
        values = list(leaves)
        for i in at:
            values[i] = leaves[i].meta["val"]
        args, kwargs = tree.unflatten(treedef, values)
        if not explicit and not draws(n.target, arguments(n.target, args, kwargs)):
            continue
        if site is None or node is None:
            node = _key_node(gm, key())
            site = Site(ft.partial(node.meta.get, "val"))
        if explicit:
            n.update_arg(0, node)
            continue
        _replace(gm, n, node, site, (leaves, treedef, at))
    return node is not None


def _key_node(gm: fx.GraphModule, key: Tensor | None) -> fx.Node:
    graph, given = gm.graph, [n for n in gm.graph.nodes if n.op == "placeholder"]
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        if key is None:
            node = graph.placeholder("key")
            device = given[0].meta["val"].device if given else "cpu"
            with detect_fake_mode([n.meta["val"] for n in given]) or contextlib.nullcontext():
                key = torch.empty(2, dtype=torch.int64, device=device)
        else:
            gm._key = key
            node = graph.create_node("get_attr", "_key")
    node.meta |= {"val": key, "label": "the key"}
    return node


def _replace(gm: fx.GraphModule, n: fx.Node, run: fx.Node, site: Site, given: tuple[Any, Any, list[int]]) -> None:
    leaves, treedef, at = given
    graph, start = gm.graph, site.count

    def flat(key: Tensor, *tensors: Tensor) -> list[Tensor]:
        full = list(leaves)
        for i, x in zip(at, tensors, strict=True):
            full[i] = x
        args, kwargs = tree.unflatten(treedef, full)
        inner = Site(lambda: key, start)
        out = value(n.target, arguments(n.target, args, kwargs), inner.draw, user_line(n))
        site.count = inner.count
        return list(out) if isinstance(out, tuple) else [out]

    mode = detect_fake_mode(site.run)
    with _disable_current_modes(), mode or contextlib.nullcontext():
        traced = make_fx(flat, pre_dispatch=True)(site.run, *(leaves[i].meta["val"] for i in at)).graph
    copied = dict(zip((m for m in traced.nodes if m.op == "placeholder"), [run, *(leaves[i] for i in at)], strict=True))
    with graph.inserting_before(n):
        for m in traced.nodes:
            if m.op == "call_function":
                copied[m] = graph.node_copy(m, lambda x: copied[x])
                copied[m].meta |= {k: v for k, v in n.meta.items() if k != "val"}
    outs = [copied[o] for o in traced.output_node().args[0]]
    if name_of(n.target).endswith("_"):
        _write(gm, n, outs[0], {copied[m] for m in traced.nodes if m.op == "call_function"})
    elif n.target._schema.returns and len(n.target._schema.returns) > 1:
        for user in list(n.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(outs[user.args[1]])
            graph.erase_node(user)
    else:
        n.replace_all_uses_with(outs[0])
    if not n.users:
        graph.erase_node(n)


def _write(gm: fx.GraphModule, n: fx.Node, drawn: fx.Node, made: set[fx.Node]) -> None:
    """What is drawn over a value that no other shares memory with is a value of its own; else it is copied there."""
    graph, x = gm.graph, n.args[0]
    n.replace_all_uses_with(drawn)
    others = [m for m in graph.nodes if m not in made and m is not n and _memory(gm, m) == _memory(gm, x)]
    if others == [x] and x.op == "call_function":
        return
    with graph.inserting_before(n):
        copy = graph.call_function(torch.ops.aten.copy_.default, (x, drawn))
        copy.meta = dict(n.meta)
    drawn.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _memory(gm: fx.GraphModule, n: fx.Node) -> int | None:
    """What is equal for values that share memory; None for what has none."""
    val = getattr(gm, n.target) if n.op == "get_attr" else n.meta.get("val")
    return val.untyped_storage()._cdata if isinstance(val, Tensor) else None
