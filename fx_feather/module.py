"""Models that are written as `torch.nn.Module`: a template of their parameters, and a pure function of these."""

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from .errors import ShapeError, fail, message, nearest, raise_all
from .initializers import Initializer
from .param import Param, given
from .trace import Block


class FromModule(NamedTuple):
    """A module as a template and a pure function; see `from_module`."""

    template: dict[str, Param]
    apply: Callable[..., Any]

    def __repr__(self) -> str:
        return f"<{self.apply.__name__} of {len(self.template)} parameters, as a template and a function>"


def from_module(
    module: nn.Module,
    dims: Mapping[str, str],
    *,
    blocks: str | Sequence[str] = (),
    init: Initializer | None = None,
    dtype: torch.dtype | None = None,
) -> FromModule:
    """Makes a template and a pure function of a `torch.nn.Module`, which itself stays as it is.

    Args:
        module: any module whose forward is a pure function of its parameters, buffers and arguments. Parameters that
            share memory are one leaf. Buffers are constants. It runs in the mode that it is in, `train()` or `eval()`.
        dims: dim names of each parameter, by patterns of its name in `module.named_parameters()`, such as
            `{"*.up.weight": "mlp embed", "*.norm.*": "embed"}`; as `fnmatch` reads `*` and `?`, the first that matches
            counts. `nn.Linear` holds its weight as (out, in).
        blocks: patterns of names of submodules, each a `block`: `"layers.*"` for the layers of a transformer. What is
            inside of a block is part of it; those that are built alike are traced once.
        init: how initial values are made, for all parameters; by default they are the module's own.
        dtype: in which parameters rest; by default the module's own.

    Returns:
        A pair: `template`, a dict of `Param`s by name, and `apply(params, *args, **kwargs)`, the result of the forward.
        Trained parameters go back by `module.load_state_dict(step.whole(state).params, strict=False)`.

    Raises:
        ShapeError: parameters without a pattern, patterns that match nothing or are hidden by those before them, other
            numbers of dims, parameters without values or gradient; all at once.

    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> dims = {"0.weight": "mlp embed", "0.bias": "mlp", "2.weight": "embed mlp", "2.bias": "embed"}
    >>> template, apply = from_module(mlp, dims)
    >>> template["0.weight"]
    Param('mlp embed', (8, 4), init=given(float32, (8, 4)), dtype=torch.float32)
    >>> x = torch.ones(2, 4)
    >>> torch.equal(apply(dict(mlp.named_parameters()), x), mlp(x))
    True
    """
    call = f"ff.from_module({type(module).__name__}, dims)"
    parameters = dict(module.named_parameters())
    chosen = {name: next((p for p in dims if fnmatch.fnmatchcase(name, p)), None) for name in parameters}
    patterns = [blocks] if isinstance(blocks, str) else list(blocks)
    matching = [(n, m) for n, m in module.named_modules() if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    units = {n: m for n, m in matching if not any(n.startswith(f"{outer}.") for outer, _ in matching)}
    problems = [*_problems(call, parameters, chosen, dims, init), *_unmatched(call, module, patterns)]
    raise_all(ShapeError, problems)
    template = {
        name: Param(
            dims[str(chosen[name])], tuple(x.shape), given(x.detach()) if init is None else init, dtype or x.dtype
        )
        for name, x in parameters.items()
    }  # fmt: skip
    alike = _alike(units)

    def apply(params: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        _check_statistics(call, module)
        with _as_blocks(alike):
            return functional_call(module, dict(params), args, kwargs)

    apply.__name__ = type(module).__name__
    return FromModule(template, apply)


class _Layer:
    """A submodule as a function of its parameters: equal for calls by one module."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self.module, self.forward, self.__name__ = module, forward, type(module).__name__

    def __call__(self, params: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        before, self.module.forward = self.module.forward, self.forward
        try:
            return functional_call(self.module, params, args, kwargs)
        finally:
            self.module.forward = before

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Layer) and self.module is other.module and self._mode == other._mode

    def __hash__(self) -> int:
        return hash((id(self.module), self._mode))

    @property
    def _mode(self) -> tuple[bool, ...]:
        return tuple(m.training for m in self.module.modules())


@contextlib.contextmanager
def _as_blocks(alike: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
    """Within, each submodule that is a block runs as one: by the forward of the first that is built as it is."""
    own = {m: m.forward for m in alike}

    def blocked(m: nn.Module) -> Callable[..., Any]:
        first = alike[m]
        layer = Block(_Layer(first, own[first]), None)
        return lambda *args, **kwargs: layer(dict(m.named_parameters()), args, kwargs)

    for m in alike:
        m.forward = blocked(m)
    try:
        yield
    finally:
        for m in alike:
            del m.forward


def _alike(units: Mapping[str, nn.Module]) -> dict[nn.Module, nn.Module]:
    """For each unit the first one that differs from it in nothing but the values of parameters."""
    out: dict[nn.Module, nn.Module] = {}
    for m in units.values():
        out[m] = next((first for first in dict.fromkeys(out.values()) if _same(first, m)), m)
    return out


def _same(a: nn.Module, b: nn.Module) -> bool:
    if type(a) is not type(b) or vars(a).keys() != vars(b).keys():
        return False
    own = {"_parameters", "_buffers", "_modules"}
    if any(not _equal(v, vars(b)[k]) for k, v in vars(a).items() if k not in own):
        return False
    shapes = [[(k, x if x is None else (x.shape, x.dtype)) for k, x in m._parameters.items()] for m in (a, b)]
    buffers = a._buffers.keys() == b._buffers.keys() and all(_equal(x, b._buffers[k]) for k, x in a._buffers.items())
    inner = a._modules.keys() == b._modules.keys() and all(
        x is y or (x is not None and y is not None and _same(x, y))
        for x, y in zip(a._modules.values(), b._modules.values(), strict=True)
    )
    return shapes[0] == shapes[1] and buffers and inner


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.dtype == y.dtype and torch.equal(x, y)
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return False
    return x is y or (type(x) is type(y) and bool(x == y))


def _check_statistics(call: str, module: nn.Module) -> None:
    norms = {
        name: m
        for name, m in module.named_modules()
        if isinstance(m, nn.modules.batchnorm._NormBase) and m.training and m.track_running_stats
    }
    if norms:
        fail(
            ShapeError,
            call=f"apply of {call}",
            got=", ".join(f"{name}: {type(m).__name__} in the mode of training" for name, m in norms.items()),
            number=f"{len(norms)} modules write running_mean and running_var",
            rule="a step writes to no buffer: whatever changes is a result of the step",
            fix="m.eval() for each of them, which keeps its statistics; or track_running_stats=False",
        )


def _problems(
    call: str,
    parameters: Mapping[str, nn.Parameter],
    chosen: Mapping[str, str | None],
    dims: Mapping[str, str],
    init: Initializer | None,
) -> Iterator[str]:
    for name, x in parameters.items():
        pattern, shape = chosen[name], tuple(x.shape)
        got = f"parameter {name!r} of shape {shape}"
        if pattern is None:
            yield message(
                call=call, got=got, number="no pattern matches it",
                rule="the dims of every parameter have names, `_` for those that no layout splits",
                fix=f"dims={{..., {name!r}: \"{' '.join('_' * len(shape)) or ''}\"}}, with names for the dims",
            )  # fmt: skip
        elif len(dims[pattern].split()) != len(shape):
            yield message(
                call=call, got=f"{got}, dims[{pattern!r}] = {dims[pattern]!r}",
                number=f"{len(dims[pattern].split())} names for {len(shape)} dims",
                rule="each dim of a parameter has one name; the first pattern that matches a parameter counts",
                fix=f"a pattern of its own before that one: {name!r}: \"{' '.join('_' * len(shape))}\", with names",
            )  # fmt: skip
        if x.is_meta and init is None:
            yield message(
                call=call, got=f"{got} on the meta device", number="it has no values",
                rule="initial values are the module's own, or made by init",
                fix="init=ff.normal(0.02), or a module that is not on the meta device",
            )  # fmt: skip
        if not x.requires_grad:
            yield message(
                call=call, got=f"{got}, requires_grad=False", number="it would be trained",
                rule="a leaf of the template is trained, unless the optimizer leaves it as it is",
                fix=f"module.requires_grad_(True), and ff.freeze(optimizer, \"*{name}*\")",
            )  # fmt: skip
    for pattern in dims:
        if pattern not in chosen.values():
            hits = [name for name in parameters if fnmatch.fnmatchcase(name, pattern)]
            yield message(
                call=call,
                got=f"dims[{pattern!r}] = {dims[pattern]!r}",
                number=f"patterns before it match all that it does, {', '.join(hits[:3])}"
                if hits
                else "it matches none",
                rule="each pattern names the dims of some parameter",
                fix="put it before them" if hits else nearest(pattern, list(parameters)),
            )


def _unmatched(call: str, module: nn.Module, patterns: Sequence[str]) -> Iterator[str]:
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            yield message(
                call=call,
                got=f"blocks={pattern!r}",
                number="it matches no submodule",
                rule="a block is a submodule, by its name in module.named_modules()",
                fix=nearest(pattern, names),
            )
