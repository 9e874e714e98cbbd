"""The user's own source lines: recorded for each operator while a function is traced, read off nodes in messages."""

import contextlib
import functools as ft
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from . import tree
from .errors import FeatherError, fail

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n *([^\n]*)')
UNKNOWN = "(source line not known)"


def user_line(node: fx.Node) -> str:
    """The line of the user's own source that made a node, as `file:line: code`."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line, code) for file, line, code in frames if not _machinery(file)]
    return "{}:{}: {}".format(*own[-1]) if own else UNKNOWN


def label(node: fx.Node) -> str:
    """What to call a value in a message: as the user's function writes an input, and the node's name otherwise."""
    return str(node.meta.get("label", node.name))


def labels(fn: Callable[..., Any], args: tree.TreeDef) -> list[str]:
    """How `fn` writes each leaf of its arguments, such as `params['mlp']['up']`."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    out = []
    for path in tree.paths_of(args):
        at, rest = path[1:].split("]", 1)
        out.append((names[int(at)] if int(at) < len(names) else f"args[{at}]") + rest)
    return out


@ft.cache
def _machinery(file: str) -> bool:
    inside = file.removeprefix(_PACKAGE)
    ours = inside != file and not inside.startswith(("nn" + os.sep, "models" + os.sep))
    return ours or any(f"{os.sep}{p}{os.sep}" in file for p in ("torch", "optree"))


class _Lines(TorchFunctionMode):
    """Notes for each operator the innermost line that is neither torch's nor this package's own.

    `make_fx` can keep stack traces by itself, but only of functions that are called `forward`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note_line()
        return func(*args, **(kwargs or {}))


def note_line() -> None:
    """Lets the nodes that are made next remember the line of the user's that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _machinery(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None:
        fx_traceback.set_stack_trace([_shown(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)])


def noted_line() -> str:
    """What `note_line` found last."""
    return fx_traceback.get_current_meta().get("stack_trace", "")


def _shown(file: str, line: int, function: str) -> str:
    return f'  File "{file}", line {line}, in {function}\n    {linecache.getline(file, line).strip()}\n'


@contextlib.contextmanager
def lines(what: str) -> Iterator[None]:
    """Within the block operators that are traced remember the user's line.

    Raises:
        FeatherError: code that depends on the values of tensors, which a trace doesn't know, or on hidden tensors.
    """
    try:
        with fx_traceback.preserve_node_meta(), _Lines():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        shape = isinstance(e, DynamicOutputShapeException)
        fail(
            FeatherError,
            call=f"{what} at {_line_of(e)}",
            got=f"the operator {e.func}",
            number="the shape of its result depends on values" if shape else "Python asks for the value of a tensor",
            rule="a function is traced once, for all values: its branches and shapes can't depend on them",
            fix="torch.where(mask, x, 0.0) in place of x[mask]"
            if shape
            else "torch.where(condition, a, b) in place of if",
        )
    except AssertionError as e:
        # What torch says of a real tensor among those of a trace.
        if "convert all Tensors to FakeTensors" not in str(e):
            raise
        fail(
            FeatherError,
            call=f"{what} at {_line_of(e)}",
            got=str(e).rpartition("Found in ")[2],
            number="1 tensor is closed over: it is neither an argument nor made here",
            rule="whatever a function reads is an argument: hidden tensors have no dims that a layout could split",
            fix="pass the tensor in the batch or among the parameters, or make it inside of the function",
        )


def _line_of(error: BaseException) -> str:
    found, at = UNKNOWN, error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if not _machinery(code.co_filename):
            found = f"{code.co_filename}:{at.tb_lineno}: {linecache.getline(code.co_filename, at.tb_lineno).strip()}"
        at = at.tb_next
    return found


def watched(fn: Callable[..., Any], what: str) -> Callable[..., Any]:
    """`fn`, with the user's lines remembered while it runs."""

    def run(*args: Any) -> Any:
        with lines(what):
            return fn(*args)

    return run
