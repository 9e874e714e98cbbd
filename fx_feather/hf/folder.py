"""Folders in Hugging Face's format: `config.json`, and safetensors in one file or in several with an index."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..errors import LayoutError, ShapeError, fail, message, raise_all
from ..layout import Layout, check_divides
from ..mesh import Mesh
from ..spec import Type, assemble, slices
from . import contents, place
from .families import of_json
from .file import changed, odd, stamp, write
from .model import Model, dtype_of
from .settings import DTYPES, Settings
from .swap import CONFIG, INDEX, SINGLE, locate, put, replacing

KEPT = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files beside the weights that are saved again as they are."""


def load(
    folder: str | Path,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    *,
    rank: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Model, Any]:
    """Reads a model and its parameters.

    Each parameter is read from where it lies in the files, straight into the part of the layout that a rank holds at
    rest: no rank holds more than its own part, and one parameter's rows while they are put in order.

    Args:
        folder: with `config.json` and safetensors.
        mesh, layout: for local parts; without them parameters are whole.
        rank: whose parts, by default this process's, as torchrun numbers it.
        dtype: of all parameters, and of the config; by default each keeps the one that its file has, and the config
            has the one in which none of them is rounded.

    Returns:
        The model, and a pytree like its template. The model keeps the tokenizer's files and the settings of generation
        too, and `save` writes them again.

    Raises:
        ShapeError: an architecture or settings that are not here, files that are missing or damaged, and tensors that
            are missing, too many or of another shape; all of a kind at once.

    >>> import tempfile
    >>> from fx_feather.models.llama import LlamaConfig
    >>> from fx_feather.param import init
    >>> model = Model(LlamaConfig(vocab=256, layers=1, embed=8, heads=2, kv_heads=1, mlp=16))
    >>> params = init(model.template)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, model, params)
    ...     again, loaded = load(folder)
    >>> again.config == model.config, torch.equal(loaded["embed"], params["embed"])
    (True, True)
    """
    folder = place.with_model(folder, "ff.hf.load")
    if (mesh is None) != (layout is None):
        fail(
            LayoutError,
            call="ff.hf.load(folder, mesh, layout)",
            got=f"mesh={mesh!r}, layout={layout!r}",
            number="one of the two is None",
            rule="local parts follow from a mesh and a layout",
            fix="both, or neither for whole parameters",
        )
    if dtype is not None and dtype not in DTYPES.values():
        fail(
            ShapeError,
            call="ff.hf.load(folder, dtype=...)",
            got=f"dtype={dtype!r}",
            number=f"{dtype!r} is no dtype of parameters",
            rule=f"parameters are one of {', '.join(map(str, DTYPES.values()))}",
            fix="dtype=torch.float32",
        )
    at_config = locate(folder, CONFIG)
    before = stamp(at_config)
    source = place.read_json(at_config, "ff.hf.load")
    where = str(folder / CONFIG)
    family = of_json(source, where)
    config = contents.sensible(where, lambda: family.config(Settings(source, where, family.defaults)))
    found = contents.files(folder, family, config)
    config, parts, treedef, at = contents.match(folder, family, config, found)
    dtypes = [dtype or at[p.names[0]].dtype for p in parts]
    config = dataclasses.replace(config, dtype=dtype_of([p.names[0] for p in parts], dtypes))
    kept = {name: locate(folder, name) for name in KEPT}
    beside = {name: path.read_bytes() for name, path in kept.items() if odd(path) is None}
    model = Model(config, source, dtypes, beside)
    template = tree.leaves(model.template)
    bounds: list[Sequence[slice] | None] = [None] * len(parts)
    shapes = [p.shape for p in parts]
    if mesh is not None and layout is not None:
        layout.check_axes(mesh)
        layout = layout.fitted(mesh, [(p.dim_names, p.shape) for p in template])
        own = _rank(mesh) if rank is None else rank
        if type(own) is not int or not 0 <= own < mesh.size:
            fail(
                LayoutError,
                call=f"ff.hf.load(folder, {mesh!r}, layout, rank={rank!r})",
                got=f"rank {own!r}" + (" of the environment's RANK" if rank is None else ""),
                number=f"the mesh has the ranks 0 to {mesh.size - 1}",
                rule="local parts are those of one rank of the mesh",
                fix=f"rank=0, a mesh of more ranks, or torchrun --nproc-per-node {mesh.size}",
            )
        paths = tree.paths_of(treedef)
        types = [layout.param_types(p.dim_names, p.shape, p.dtype, q) for p, q in zip(template, paths, strict=True)]
        # What can't be computed with isn't loaded either: a rank beyond the last head would get nothing but padding.
        check_divides(((f"params{q}", t.compute) for q, t in zip(paths, types, strict=True)), mesh)
        for i, t in enumerate(types):
            bounds[i], shapes[i] = slices(t.store, mesh, own), t.store.local_shape(mesh)

    def get(name: str, wanted: tuple[slice, ...]) -> Tensor:
        return at[name].read(wanted)

    # All at first, so that what is held in between does not lie between them, where it would leave holes.
    leaves = [torch.empty(shape, dtype=d) for shape, d in zip(shapes, dtypes, strict=True)]
    for leaf, part, b in zip(leaves, parts, bounds, strict=True):
        value = part.read(get, b)
        if value.shape != leaf.shape:
            leaf.zero_()
        leaf[tuple(slice(0, n) for n in value.shape)] = value.to(leaf.dtype)
    if stamp(locate(folder, CONFIG)) != before:
        changed(folder / CONFIG, "another model was saved here meanwhile")
    return model, tree.unflatten(treedef, leaves)


def _rank(mesh: Mesh) -> int:
    return int(os.environ.get("RANK", "0")) if mesh.size > 1 else 0


def save(
    folder: str | Path,
    model: Model,
    params: Any,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    shard_bytes: int = 5 << 30,
) -> None:
    """Writes a model and its parameters as `transformers` loads them.

    A model that is there is replaced at one moment: whatever ends the process, and whenever, `load` finds the old model
    or the new one. Weights of the old one are removed; files that are no part of a model stay. The config names the
    dtype that the parameters have now. One process writes: whole parameters are the same on every rank.

    Args:
        folder: where to; it is made if there is none.
        model: which names the parameters have.
        params: a pytree like the template. With `mesh` and `layout`, a list of such, the local parts of every rank;
            they are put together one parameter at a time.
        mesh, layout: what the parts follow from.
        shard_bytes: size of a file at most, unless one tensor is larger.

    Raises:
        ShapeError: parameters unlike the template, all of them at once; a folder that another process writes to, or
            that holds an adapter.
    """
    folder = place.for_model(folder, "ff.hf.save")
    template, treedef = tree.flatten(model.template)
    paths = tree.paths_of(treedef)
    ranks = [params]
    if mesh is not None and layout is not None:
        ranks = list(params) if isinstance(params, (list, tuple)) else []
        if len(ranks) != mesh.size:
            many = f"{len(ranks)} of them" if ranks else f"a {type(params).__name__}"
            fail(
                ShapeError,
                call=f"ff.hf.save(folder, model, params, mesh={mesh!r}, layout=...)",
                got=f"params is {many}",
                number=f"the mesh has {mesh.size} ranks",
                rule="with a mesh and a layout, params is a list of the parts of every rank",
                fix="ff.hf.save(folder, model, step.whole(state).params), called by one rank after all called whole",
            )
    types: list[Type | None] = [None] * len(template)
    if mesh is not None and layout is not None:
        layout = layout.fitted(mesh, [(p.dim_names, p.shape) for p in template])
        types = [
            layout.param_types(p.dim_names, p.shape, p.dtype, path).store
            for p, path in zip(template, paths, strict=True)
        ]
    by_rank = [tree.leaves(p) for p in ranks]
    for p in ranks:
        tree.check_same(treedef, p, call="ff.hf.save(folder, model, params)", name="params")
    values = [[leaves[i] for leaves in by_rank] for i in range(len(template))]
    _check_shapes(template, paths, values, types, mesh)
    holders: dict[str, list[int]] = {}
    parts = tree.leaves(model.parts())
    for i, part in enumerate(parts):
        for name in part.names:
            holders.setdefault(name, []).append(i)
    shapes = {name: (values[own[0]][0].dtype, parts[own[0]].file_shape) for name, own in holders.items()}
    files = _split(shapes, shard_bytes)

    def value(i: int) -> Tensor:
        t = types[i]
        return values[i][0] if t is None or mesh is None else assemble(values[i], t, mesh)

    def tensors(names: Sequence[str]) -> Any:
        last: dict[int, Tensor] = {}
        for name in names:
            out = torch.zeros(shapes[name][1], dtype=shapes[name][0])
            # Stacked tensors come one after another: their parameter is put together once.
            last = {i: last[i] if i in last else value(i) for i in holders[name]}
            for i in holders[name]:
                parts[i].write(last[i].detach().cpu(), name, out)
            yield out

    total = sum(_bytes(*shapes[name]) for name in shapes)
    weight_map = {name: file for file, names in files.items() for name in names}
    dtype = dtype_of(list(shapes), [d for d, _ in shapes.values()])
    texts = {CONFIG: model.json(dtype)}
    if len(files) > 1:
        texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with replacing(folder) as new:
        for file, names in files.items():
            write(new / file, {n: shapes[n] for n in names}, tensors(names))
        for name, data in model.files.items():
            put(new / name, data)
        for name, value_ in texts.items():
            put(new / name, (json.dumps(value_, indent=2) + "\n").encode())


def _check_shapes(
    template: Sequence[Any],
    paths: Sequence[str],
    values: Sequence[list[Tensor]],
    types: Sequence[Type | None],
    mesh: Mesh | None,
) -> None:
    wanted = [
        p.shape if t is None or mesh is None else t.local_shape(mesh) for p, t in zip(template, types, strict=True)
    ]
    raise_all(
        ShapeError,
        [
            message(
                call=f"ff.hf.save(folder, model, params), params{path}",
                got=f"shape {list(x.shape)}",
                number=f"{list(x.shape)} is not {list(shape)}",
                rule="parameters are like the model's template, whole or the parts of its layout",
                fix="params of this model: from its init, a step's whole(state), or load",
            )
            for path, shape, each in zip(paths, wanted, values, strict=True)
            for x in each[:1]
            if tuple(x.shape) != shape
        ],
    )


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    n = dtype.itemsize
    for size in shape:
        n *= size
    return n


def _split(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], limit: int) -> dict[str, list[str]]:
    """File names, and the tensors in each."""
    groups: list[list[str]] = [[]]
    room = limit
    for name, what in shapes.items():
        n = _bytes(*what)
        if n > room and groups[-1]:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= n
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups)}
