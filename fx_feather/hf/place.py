"""What a path is that should be a folder with a model, and its JSON files, read with one message for all mistakes."""

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ShapeError, fail
from .file import odd

LARGEST = 64 << 20
"""Bytes of a JSON file at most."""

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "pytorch_model.pt")


def folder(path: str | Path, call: str) -> Path:
    """A path as given, once it is one that can be a folder.

    Raises:
        ShapeError: no path at all, a file, or one that begins with `~`.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path) or not str(path):
        _refuse(call, path, "it is no path", "a folder is a path, as text or a Path", f"{call}('my_model')")
    if str(path).startswith("~"):
        fix = f"{call}({os.path.expanduser(path)!r})"
        _refuse(
            call, path, "'~' is not a folder: only a shell turns it into one's home", "a path is taken as it is", fix
        )
    out = Path(path)
    if os.path.lexists(out) and not out.is_dir():
        wrong = "it is a file" if out.is_file() else odd(out) or ""
        _refuse(call, path, wrong, "a model is a folder: config.json and its weights", f"{call}({str(out.parent)!r})")
    return out


def with_model(path: str | Path, call: str) -> Path:
    """A folder that can hold a whole model.

    Raises:
        ShapeError: a name of the hub, a folder that is not there, or one with an adapter.
    """
    out = folder(path, call)
    if not out.exists():
        if re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", str(path)):
            rule = "nothing is fetched from a network: a name of the hub is downloaded first"
            fix = f"hf download {path} --local-dir my_model, then {call}('my_model')"
            beside = [p.name for p in out.parent.iterdir() if p.is_dir()] if out.parent.is_dir() else []
            near = difflib.get_close_matches(out.name, beside, n=1)
            fix = f"{call}({str(out.parent / near[0])!r}), which is there; or {fix}" if near else fix
            _refuse(call, path, "there is no such folder; it may be a name of the hub", rule, fix)
        _refuse(call, path, "there is no such folder", "a model is a folder with config.json and weights", "its path")
    return for_model(out, call)


def for_model(path: str | Path, call: str) -> Path:
    """A folder in which a model is the whole of it.

    Raises:
        ShapeError: a file, or a folder with an adapter.
    """
    out = folder(path, call)
    beside = [name for name in ADAPTERS if os.path.lexists(out / name)]
    if beside:
        rule = "an adapter changes the weights that it lies beside; here it would be left out"
        fix = "merge it first: peft's merge_and_unload(), then save_pretrained to another folder"
        _refuse(call, path, f"{', '.join(beside)}: the folder holds an adapter (LoRA)", rule, fix)
    return out


def pickled(path: Path) -> list[str]:
    """Clauses that name weights which are there, but in a format that runs code when it is read."""
    there = [name for name in PICKLES if os.path.lexists(path / name)]
    return [f"{', '.join(there)}: pickled weights only; save_pretrained(..., safe_serialization=True)"] if there else []


def read_json(path: Path, call: str) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
        ShapeError: whatever is wrong with it.
    """
    wrong = odd(path)
    if wrong is None and path.stat().st_size > LARGEST:
        wrong = f"it has {path.stat().st_size} bytes, more than {LARGEST}"
    value: Any = None
    if wrong is None:
        try:
            value = json.loads(path.read_bytes().decode())
        except (OSError, ValueError, RecursionError) as e:
            wrong = str(e)
        else:
            if not isinstance(value, dict):
                wrong = f"it is a JSON {type(value).__name__}, not an object"
    if wrong is not None:
        _refuse(
            f"{call}({str(path.parent)!r})",
            f"{path.name}: {wrong}",
            f"{path.name} can't be read",
            "a folder holds config.json and safetensors",
            "the folder that a model was saved to",
        )
    return dict(value)


def _refuse(call: str, got: object, number: str, rule: str, fix: str) -> NoReturn:
    fail(ShapeError, call=call, got=got if isinstance(got, str) else repr(got), number=number, rule=rule, fix=fix)
