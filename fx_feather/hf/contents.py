"""What a folder in Hugging Face's format holds, checked before any weight is read."""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from ..errors import FeatherError, ShapeError, fail, message, raise_all
from .commit import Files
from .families import Family
from .file import CHUNK, Entry, entries
from .part import Part
from .settings import DTYPES

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHOWN = 20
"""Tensors that are listed in a message before `and N more`."""


def checked_folder(folder: Path) -> Path:
    """The folder, or an error that says what else was named, and what to name."""
    if folder.is_dir():
        kinds = {
            "adapter_config.json": (
                "an adapter (LoRA) on top of another model",
                "merge it: merge_and_unload(), then save",
            ),
            "pytorch_model.bin": ("pickled weights", "save it once more by transformers, as safetensors"),
        }
        for name, (what, fix) in kinds.items():
            # Pickled weights beside safetensors are only the older of two copies.
            beside = name == "pytorch_model.bin" and any(folder.glob("*.safetensors"))
            if (folder / name).exists() and not beside:
                _refuse_folder(folder, f"a folder of {what}: {name}", "weights are safetensors of the whole model", fix)
        return folder
    home = Path(os.path.expanduser(folder))
    if str(folder).startswith("~") and home.is_dir():
        _refuse_folder(folder, "a path with ~", "a path is taken as it is written", f"ff.hf.load({str(home)!r})")
    if folder.exists():
        _refuse_folder(
            folder, "a file", "a folder holds config.json and safetensors", f"ff.hf.load({str(folder.parent)!r})"
        )
    _refuse_folder(
        folder,
        "a path that is not there",
        "weights are read from a folder of this machine; nothing is downloaded",
        "the folder that huggingface_hub.snapshot_download(...) returns"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder))
        else "the folder that a model was saved to",
    )


def _refuse_folder(folder: Path, got: str, rule: str, fix: str) -> NoReturn:
    number = f"{str(folder)!r} is no folder of a model"
    fail(ShapeError, call=f"ff.hf.load({str(folder)!r})", got=got, number=number, rule=rule, fix=fix)


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


def check_sizes(where: str, config: Any, found: Mapping[str, Entry]) -> None:
    """Refuses more layers or experts than there are tensors, before a tree of all is made."""
    many = {k: v for k, v in vars(config).items() if k in ("layers", "experts") and isinstance(v, int)}
    over = {k: v for k, v in many.items() if v > len(found)}
    if over:
        fail(
            ShapeError,
            call=where,
            got=", ".join(f"{k} {v}" for k, v in over.items()),
            number=f"{len(found)} tensors in the files",
            rule="each layer, and each expert of it, has tensors of its own",
            fix="the config.json that these weights were saved with",
        )


def untied(family: Family, config: Any, found: Mapping[str, Entry]) -> Any:
    """The config, with a head of its own where the files hold one that is not the embedding, as transformers has it."""
    head = found.get("lm_head.weight")
    table = next((found[n] for n in ("model.embed_tokens.weight", "embed_tokens.weight") if n in found), None)
    if not getattr(config, "tied", False) or head is None or table is None or head.shape != table.shape:
        return config
    step = max(1, CHUNK // max(1, table.nbytes // max(1, table.shape[0])))
    for at in range(0, table.shape[0], step):
        rows = (slice(at, at + step), *(slice(None),) * (len(table.shape) - 1))
        if not torch.equal(head.read(rows), table.read(rows)):
            return dataclasses.replace(config, tied=False)
    return config


def read_json(files: Files, name: str) -> dict[str, Any]:
    """A JSON object of a folder."""
    path = files.path(name)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        value = json.loads(path.read_text())
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not an object")
        return value
    except (OSError, ValueError, RecursionError) as e:
        fail(
            ShapeError,
            call=f"ff.hf.load({str(files.folder)!r})",
            got=f"{name}: {e}",
            number=f"{name} can't be read",
            rule="a folder holds config.json and safetensors",
            fix="the folder that a model was saved to",
        )


def _weight_map(files: Files) -> dict[str, str]:
    """Which file of the folder holds each tensor, by its index."""
    found = read_json(files, INDEX).get("weight_map")
    bad = (
        [f"weight_map is {type(found).__name__}"]
        if not isinstance(found, dict)
        else [
            f"{name!r} is in {file!r}"
            for name, file in found.items()
            if not isinstance(file, str) or Path(file).name != file or file in (".", "..")
        ]
    )
    if bad:
        fail(
            ShapeError,
            call=f"ff.hf.load({str(files.folder)!r})",
            got=f"{INDEX}: {_some(bad)}",
            number=f"{len(bad)} entries of weight_map name no file of the folder",
            rule="an index names for each tensor a file beside it",
            fix="the index, copied again",
        )
    return dict(found or {})


def tensors_of(files: Files) -> dict[str, Entry]:
    """All tensors of a folder, or one error that lists what is wrong with its files."""
    weight_map: Mapping[str, str] = {}
    if files.has(INDEX):
        weight_map = _weight_map(files)
        names = sorted(set(weight_map.values()))
    else:
        names = [SINGLE]
    folder = files.folder
    found: dict[str, Entry] = {}
    problems = []
    for name in names:
        inside, wrong = entries(files.path(name)) if files.has(name) else ({}, ["it is missing"])
        found |= inside
        wrong += [f"tensor {t!r} is not in it" for t, f in weight_map.items() if f == name and t not in inside][:SHOWN]
        if wrong:
            problems.append(
                message(
                    call=f"ff.hf.load({str(folder)!r})",
                    got=f"file {name}",
                    number="\n".join(wrong),
                    rule="weights are safetensors, complete; nothing is unpickled",
                    fix="the file, copied again",
                )
            )
    raise_all(ShapeError, problems)
    return found


def matched(
    folder: Path, family: Family, config: Any, parts: Sequence[Part], found: dict[str, Entry]
) -> dict[str, Entry]:
    """The file tensors by their full names; one error lists all that are missing, too many or misshapen."""
    if not any(name.startswith(family.prefix) for name in found):
        full = {name for p in parts for name in p.names}
        found = {n if n in full else family.prefix + n: e for n, e in found.items()}
    wanted = {name: p.file_shape for p in parts for name in p.names}
    missing = [name for name in wanted if name not in found]
    extra = [n for n in found if n not in wanted and not _ignored(n, family, config)]
    shapes = [
        f"{name}: {list(found[name].shape)} in the file, {list(shape)} by the config"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    coded = [
        f"{name}: {str(found[name].dtype).removeprefix('torch.')}"
        for name in wanted
        if name in found and found[name].dtype not in DTYPES.values()
    ]
    kinds = {
        "missing": missing,
        "in the files, but not in the model": extra,
        "of another shape": shapes,
        "quantised, or of no dtype that a model computes in": coded,
    }
    lines = [f"{len(n)} {kind}: {_some(n)}" for kind, n in kinds.items() if n]
    if lines:
        fail(
            ShapeError,
            call=f"ff.hf.load({str(folder)!r})",
            got=f"{len(found)} tensors for {type(config).__name__} with {len(wanted)}",
            number="\n".join(lines),
            rule="a checkpoint holds exactly the parameters that its config describes",
            fix="the config.json that these weights were saved with",
        )
    return found


def _ignored(name: str, family: Family, config: Any) -> bool:
    if any(re.search(pattern, name) for pattern in family.ignored):
        return True
    # A tied head may be saved once more; DeepSeek's files hold layers that predict further tokens, after the last.
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    beyond = family.architecture == "DeepseekV3ForCausalLM" and layer is not None and int(layer[1]) >= config.layers
    return (name == "lm_head.weight" and getattr(config, "tied", True)) or beyond


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
