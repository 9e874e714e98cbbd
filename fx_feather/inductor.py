"""Inductor: compiles one local function, whose operands are freed as they are used up."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .errors import BackendError, message
from .heap import give_back

Boxed = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def compiled(module: fx.GraphModule) -> Callable[..., Any]:
    """A graph compiled by inductor when it is first called, once for each way in which its operands lie in memory.

    What the graph gives is a tensor, or a list of them.

    `torch.compile` would hold all operands until the function returns; what this gives has an attribute `boxed`, which
    takes them out of a list. The graph is an ATen graph already, so nothing needs to look at Python's bytecode either.
    """
    made: dict[tuple[tuple[int, ...], ...], Boxed] = {}
    several = isinstance(module.graph.output_node().args[0], (list, tuple))

    def boxed(args: list[torch.Tensor]) -> list[torch.Tensor]:
        strides = tuple(x.stride() for x in args)
        if strides not in made:
            made[strides] = _compile(module, args)
            give_back()
        return list(made[strides](args))

    def run(*args: torch.Tensor) -> Any:
        out = boxed(list(args))
        return out if several else out[0]

    run.boxed = boxed  # type: ignore[attr-defined]
    return run


def _compile(module: fx.GraphModule, args: list[torch.Tensor]) -> Boxed:
    # Here and not above: inductor takes seconds to import, and warns of other modules of torch. The names are its own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V

    def flat(*xs: torch.Tensor) -> list[torch.Tensor]:
        out = module.forward(*xs)
        return [out] if isinstance(out, torch.Tensor) else list(out)

    # Inductor keeps what it compiled on the disk, by a key that asks for an environment of sizes, though none vary.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    # One stand-in for each operand, even where the same tensor came twice: the next call may bring two.
    with mode:
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in args]
    with torch.no_grad(), tracing(TracingContext(mode)), V.set_fake_mode(mode):
        lowered = make_fx(torch.func.functionalize(flat), select_decomp_table())(*fakes)
        joint_graph_passes(lowered)
        try:
            return compile_fx_inner(lowered, fakes)
        except Exception as e:
            if "InvalidCxxCompiler" not in f"{type(e).__name__}: {e}":
                raise
            parts = message(
                call='backend="inductor"',
                got=str(e).splitlines()[0],
                number="there is no C++ compiler that works",
                rule="on CPUs inductor writes C++, which has to be compiled",
                fix='install g++, name a compiler in the environment variable CXX, or take backend="eager"',
            )
            raise BackendError(parts) from e
