"""The user's own source lines: recorded for each operator while a function is traced, read off nodes in messages."""

import contextlib
import functools as ft
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import optree
import torch
from torch import fx
from torch.fx import traceback as fx_traceback

from . import tree

_PACKAGE, *_OTHERS = (os.path.dirname(os.path.abspath(f)) + os.sep for f in (__file__, torch.__file__, optree.__file__))
_OTHERS.append(contextlib.__file__)  # a function under a context manager is called from there
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n *([^\n]*)')
UNKNOWN = "(source line not known)"


def user_line(node: fx.Node) -> str:
    """The line of the user's own source that made a node, as `file:line: code`."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line, code) for file, line, code in frames if not is_machinery(file)]
    return "{}:{}: {}".format(*own[-1]) if own else UNKNOWN


def label(node: fx.Node) -> str:
    """What to call a value in a message: as the user's function writes an input, and the node's name otherwise."""
    return str(node.meta.get("label", node.name))


def labels(fn: Callable[..., Any], args: tree.TreeDef) -> Callable[[int], str]:
    """How `fn` writes a leaf of its arguments, given the leaf's number: such as `params['mlp']['up']`."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    accessors = optree.treespec_accessors(args)

    def written(i: int) -> str:
        at, rest = accessors[i].codify("")[1:].split("]", 1)
        return (names[int(at)] if int(at) < len(names) else f"args[{at}]") + rest

    return written


@ft.cache
def is_machinery(file: str) -> bool:
    """Whether a source file is of this package (models aside), of torch or of optree, and not the user's own."""
    inside = file.removeprefix(_PACKAGE)
    ours = inside != file and not inside.startswith(("nn" + os.sep, "models" + os.sep))
    return ours or file.startswith(tuple(_OTHERS))


def _own_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (is_machinery(frame.f_code.co_filename) or _made_by_torch(frame)):
        frame = frame.f_back
    return frame


def _made_by_torch(frame: FrameType) -> bool:
    """Whether a frame is of code that torch wrote out and runs itself; a user's `python -c` is called by others."""
    caller = frame.f_back
    of_torch = caller is not None and caller.f_code.co_filename.startswith(_OTHERS[0])
    return frame.f_code.co_filename == "<string>" and of_torch


def note_line() -> None:
    """Lets the nodes that are made next remember the line of the user's that is being run."""
    shown = stack_of_user()
    if shown:
        fx_traceback.set_stack_trace([shown])


def stack_of_user() -> str:
    """The line of the user's that is being run, as a node's `stack_trace` has it; nothing if there is none."""
    frame = _own_frame()
    return _shown(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else ""


def this_line() -> str:
    """The line of the user's that is being run, as `file:line: code`."""
    frame = _own_frame()
    if frame is None:
        return UNKNOWN
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"


def noted_line() -> str:
    """What `note_line` found last."""
    return fx_traceback.get_current_meta().get("stack_trace", "")


def _shown(file: str, line: int, function: str) -> str:
    return f'  File "{file}", line {line}, in {function}\n    {linecache.getline(file, line).strip()}\n'


def line_of(error: BaseException) -> str:
    """The line of the user's own source that raised an error."""
    found, at = UNKNOWN, error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if not is_machinery(code.co_filename):
            found = f"{code.co_filename}:{at.tb_lineno}: {linecache.getline(code.co_filename, at.tb_lineno).strip()}"
        at = at.tb_next
    return found
