"""The tensors of a folder: in which files they are, and whether they are those that a config describes."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .. import tree
from ..errors import FeatherError, ShapeError, fail, message, raise_all
from .families import Family
from .file import Entry, entries, equal
from .part import Part
from .place import pickled, read_json
from .settings import DTYPES
from .swap import INDEX, SINGLE, locate, names

CALL = "ff.hf.load"
HEAD = "lm_head.weight"
SHOWN = 20
"""Tensors that are listed in a message before `and N more`."""


_Result = TypeVar("_Result")


def sensible(where: str, make: Callable[[], _Result]) -> _Result:
    """What is made of a config; settings that no model can have are one error and no traceback."""
    try:
        return make()
    except FeatherError as e:
        raise type(e)(str(e) if where in str(e) else f"{where}: {e}") from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError) as e:
        fail(
            ShapeError,
            call=where,
            got=f"{type(e).__name__}: {e}",
            number="a setting is of another kind than a model has",
            rule="a config holds the sizes and constants of its model, as numbers",
            fix="the config.json that these weights were saved with",
        )


def files(folder: Path, family: Family, config: Any) -> dict[str, Entry]:
    """All tensors of a folder, or one error that lists what is wrong with its files."""
    mapped = _mapped(folder)
    there = sorted(set(mapped.values())) if mapped else [SINGLE]
    found: dict[str, Entry] = {}
    problems = []
    for name in there:
        inside, wrong = entries(locate(folder, name))
        if wrong == ["it is missing"]:
            wrong += pickled(folder)
        twice = sorted(inside.keys() & found.keys())
        if twice:
            wrong.append(f"{len(twice)} tensors are in {found[twice[0]].path.name} too: {some(twice)}")
        found |= inside
        # A tied head is named by some indexes though no file has it.
        absent = [t for t, f in mapped.items() if f == name and t not in inside and not _ignored(t, family, config)]
        wrong += [f"tensor {t!r} is not in it" for t in absent[:SHOWN]]
        if wrong:
            problems.append(_problem(folder, f"file {name}", "\n".join(wrong), "the file, copied again"))
    raise_all(ShapeError, problems)
    return found


def _problem(folder: Path, got: str, number: str, fix: str) -> str:
    rule = "weights are safetensors, complete; nothing is unpickled"
    return message(call=f"{CALL}({str(folder)!r})", got=got, number=number, rule=rule, fix=fix)


def _mapped(folder: Path) -> Mapping[str, str]:
    """The file of each tensor by the index; empty where there is one file without an index."""
    ahead = names(folder)
    index = INDEX in ahead if ahead is not None else (folder / INDEX).exists()
    if not index:
        return {}
    mapped = read_json(locate(folder, INDEX), CALL).get("weight_map")
    wrong = []
    if not isinstance(mapped, dict) or not mapped:
        wrong = [f"its weight_map is {str(mapped)[:60]}, no object of tensor names and file names"]
    else:
        odd = {str(f)[:200]: t for t, f in mapped.items() if not isinstance(f, str) or not _plain(f)}
        wrong = [f"tensor {t!r} is in {f!r}, which is no name of a file in this folder" for f, t in odd.items()]
        both = ahead is None and (folder / SINGLE).exists() and SINGLE not in mapped.values()
        if both:
            wrong.append(f"{SINGLE} is there too: the index and it are two models; delete the one not meant")
    if wrong:
        raise ShapeError(_problem(folder, INDEX, "\n".join(wrong[:SHOWN]), "the index that these weights came with"))
    return {str(t): str(f) for t, f in mapped.items()} if isinstance(mapped, dict) else {}


def _plain(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not set(name) & {"/", "\\", "\0"} and len(name.encode()) < 256


def match(
    folder: Path, family: Family, config: Any, found: dict[str, Entry]
) -> tuple[Any, Sequence[Part], Any, dict[str, Entry]]:
    """The config, where its parameters lie, and the file tensors by their full names.

    A tied config whose files hold another head is untied, as `transformers` does. One error lists all tensors that are
    missing, too many, misshapen, or no floating numbers.
    """
    if not any(name.startswith(family.prefix) for name in found):
        found = {n if n == HEAD else family.prefix + n: e for n, e in found.items()}
    _bounded(folder, config, found)
    parts, treedef = tree.flatten(family.parts(config))
    table = family.parts(config)["embed"].names[0]
    tied, lines = getattr(config, "tied", True), []
    if tied and HEAD in found and table not in found:
        found = {table if n == HEAD else n: e for n, e in found.items()}
    if tied and HEAD in found and table in found and not equal(found[HEAD], found[table]):
        if hasattr(config, "tied"):
            config = dataclasses.replace(config, tied=False)
            parts, treedef = tree.flatten(family.parts(config))
        else:
            lines = [f"{HEAD} differs from {table}, to which the head of this architecture is tied"]
    wanted = {name: p.file_shape for p in parts for name in p.names}
    missing = [name for name in wanted if name not in found]
    extra = [n for n in found if n not in wanted and not _ignored(n, family, config)]
    shapes = [
        f"{name}: {list(found[name].shape)} in the file, {list(shape)} by the config"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    kinds = [
        f"{n}: {str(found[n].dtype).removeprefix('torch.')}"
        for n in wanted
        if n in found and found[n].dtype not in DTYPES.values()
    ]
    listed = {
        "missing": missing,
        "in the files, but not in the model": extra,
        "of another shape": shapes,
        "quantised or no floating numbers (fp8, int8)": kinds,
    }
    lines += [f"{len(n)} {kind}: {some(n)}" for kind, n in listed.items() if n]
    if lines:
        fail(
            ShapeError,
            call=f"{CALL}({str(folder)!r})",
            got=f"{len(found)} tensors for {type(config).__name__} with {len(wanted)}",
            number="\n".join(lines),
            rule="a checkpoint holds exactly the parameters that its config describes, as floating numbers",
            fix="the config.json that these weights were saved with; dequantised weights where they are quantised",
        )
    return config, parts, treedef, found


def _bounded(folder: Path, config: Any, found: Mapping[str, Entry]) -> None:
    """Refuses a config of many more layers or experts than there are tensors, before they are listed one by one."""
    routed = config.layers - getattr(config, "dense_layers", 0) - len(getattr(config, "dense", ()))
    least = config.layers + max(0, routed) * getattr(config, "experts", 0)
    if least <= len(found) + 1000:
        return
    layers = {m[1] for name in found if (m := re.search(r"\.(\d+)\.", name))}
    fail(
        ShapeError,
        call=f"{CALL}({str(folder)!r})",
        got=f"{len(found)} tensors, of {len(layers)} layers",
        number=f"a config of {config.layers} layers describes {least} tensors or more",
        rule="a checkpoint holds exactly the parameters that its config describes",
        fix="the config.json that these weights were saved with",
    )


def _ignored(name: str, family: Family, config: Any) -> bool:
    if any(re.search(pattern, name) for pattern in family.ignored):
        return True
    # A tied head may be saved once more; DeepSeek's files hold layers that predict further tokens, after the last.
    layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
    beyond = family.architecture == "DeepseekV3ForCausalLM" and layer is not None and int(layer[1]) >= config.layers
    return (name == HEAD and getattr(config, "tied", True)) or beyond


def some(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
