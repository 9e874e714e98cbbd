"""Pytrees with key paths: what every other module uses to walk parameters, states and batches."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import optree
from optree.registry import __GLOBAL_NAMESPACE as _EVERYWHERE

from .errors import ShapeError, fail

Tree = Any
TreeDef = optree.PyTreeSpec

_SHOWN = 8  # paths listed in a message before "and N more"


def flatten(tree: Tree) -> tuple[list[Any], TreeDef]:
    """The leaves of a tree, and the definition that rebuilds it.

    Dicts are walked in sorted key order, so that two dicts with the same keys have the same leaves. `None` is a node
    without leaves.

    >>> flatten({"b": [1, None], "a": 2})[0]
    [2, 1]
    """
    return optree.tree_flatten(tree)


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Tree:
    """The tree of the given definition and leaves.

    Raises:
        ShapeError: another number of leaves than the definition has.

    >>> values, treedef = flatten({"b": 1, "a": 2})
    >>> unflatten(treedef, [v * 10 for v in values])
    {'b': 10, 'a': 20}
    """
    values = list(leaves)
    if len(values) != treedef.num_leaves:
        fail(
            ShapeError,
            call="tree.unflatten(treedef, leaves)",
            got=f"{len(values)} leaves for {treedef}",
            number=f"{len(values)} leaves, but the definition has {treedef.num_leaves}",
            rule="a definition takes exactly one value a leaf, in flatten order",
            fix="pass the leaves of a tree that `tree.flatten` gave this definition for",
        )
    return optree.tree_unflatten(treedef, values)


def leaves(tree: Tree) -> list[Any]:
    """The leaves of a tree in flatten order.

    >>> leaves({"b": (1, 2), "a": 3})
    [3, 1, 2]
    """
    return optree.tree_leaves(tree)


def structure(tree: Tree) -> TreeDef:
    """The definition of a tree, without its leaves."""
    return optree.tree_structure(tree)


def paths_of(treedef: TreeDef) -> list[str]:
    """The key path of each leaf of a definition, in flatten order."""
    return [accessor.codify("") for accessor in optree.treespec_accessors(treedef)]


def paths(tree: Tree) -> list[str]:
    """The key path of each leaf in flatten order: what follows the name of the tree to reach that leaf.

    >>> paths({"layers": [{"mlp": {"up": 1, "down": 2}}], "embed": 3})
    ["['embed']", "['layers'][0]['mlp']['down']", "['layers'][0]['mlp']['up']"]
    """
    return paths_of(structure(tree))


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Applies `fn` to each leaf, and to the leaves at the same paths of the other trees.

    Raises:
        ShapeError: a tree of another structure, with the paths that it misses and those that are extra.

    >>> map(lambda a, b: a + b, {"x": 1, "y": [2]}, {"x": 10, "y": [20]})
    {'x': 11, 'y': [22]}
    """
    return _map(fn, [], tree, rest)


def map_with_path(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Like `map`, with the key path of the leaf as the first argument of `fn`.

    >>> map_with_path(lambda path, a: f"{path} is {a}", {"x": [1]})
    {'x': ["['x'][0] is 1"]}
    """
    return _map(fn, [paths(tree)], tree, rest)


def check_same(expected: Tree | TreeDef, tree: Tree, *, call: str, name: str = "the other tree") -> TreeDef:
    """Raises ShapeError unless `tree` has the expected structure; returns that structure.

    `expected` is a tree or a definition. `call` and `name` open the message: which call, and which of its trees.
    """
    wanted = expected if isinstance(expected, TreeDef) else structure(expected)
    found = structure(tree)
    if wanted == found:
        return wanted
    expected_paths, found_paths = paths_of(wanted), paths_of(found)
    missing = [p for p in expected_paths if p not in set(found_paths)]
    extra = [p for p in found_paths if p not in set(expected_paths)]
    if missing or extra:
        number = f"missing: {_listed(missing)}\nextra:   {_listed(extra)}"
        fix = "; ".join(
            [f"add {_listed(missing)}" for _ in missing[:1]] + [f"remove {_listed(extra)}" for _ in extra[:1]]
        )
    else:
        number = "missing: none\nextra:   none, but the containers differ in type or are empty in one of the two"
        fix = f"use the same containers (dict, list, tuple): {_short(wanted)}"
    fail(
        ShapeError,
        call=call,
        got=f"{name} with {found.num_leaves} leaves, where {wanted.num_leaves} are expected",
        number=number,
        rule="trees that are walked together have the same containers and keys; None holds no leaf",
        fix=fix,
    )


_Class = TypeVar("_Class", bound=type)


def node(cls: _Class, *, static: Sequence[str] = ()) -> _Class:
    """Makes a dataclass a node of trees: its fields are its children, those named `static` part of the structure.

    It is a decorator, and also takes the class of another package. A node is rebuilt field by field, without a call of
    `__init__` or `__post_init__`, since a field may hold a spec or a name in the place of a tensor.

    Args:
        cls: a dataclass, frozen or not.
        static: fields that hold no tensors, such as a size or a name. They are compared by `==`.

    Raises:
        ShapeError: what is no dataclass, or static fields that it doesn't have.

    >>> @node
    ... @dataclasses.dataclass
    ... class Linear:
    ...     weight: object
    ...     bias: object = None
    >>> paths({"up": Linear(1, 2)}), map(lambda x: x * 10, Linear(1, 2))
    (["['up'].weight", "['up'].bias"], Linear(weight=10, bias=20))
    """
    known = [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    unknown = [name for name in static if name not in known]
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls) or unknown:
        fail(
            ShapeError,
            call=f"ff.tree.node({getattr(cls, '__name__', cls)}, static={tuple(static)!r})",
            got=f"fields {known}" if known else f"{cls!r}, which is no dataclass",
            number=f"no field {unknown[0]!r}" if known and unknown else f"{cls!r} has no fields",
            rule="a node is a dataclass whose fields are its children, in the order in which they are defined",
            fix="@ff.tree.node above @dataclasses.dataclass" if not known else f"static names of {known}",
        )
    children = tuple(name for name in known if name not in static)

    def take_apart(x: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
        return [getattr(x, name) for name in children], tuple(getattr(x, name) for name in static), children

    def build(fixed: Any, values: Iterable[Any]) -> Any:
        x = object.__new__(cls)
        for name, value in (*zip(children, values, strict=True), *zip(static, fixed, strict=True)):
            object.__setattr__(x, name, value)
        return x

    optree.register_pytree_node(
        cls,  # type: ignore[arg-type]
        take_apart,
        build,
        path_entry_type=optree.GetAttrEntry,
        namespace=_EVERYWHERE,
    )
    return cls


def as_node(leaf: Any, fix: str) -> str:
    """The edit that mends a leaf that should have been a tensor: `fix`, or for a dataclass, to make it a node."""
    if dataclasses.is_dataclass(leaf):
        cls = leaf if isinstance(leaf, type) else type(leaf)
        return f"@ff.tree.node above the dataclass {cls.__name__}, whose fields are leaves then"
    return fix


def _map(fn: Callable[..., Any], first: list[list[Any]], tree: Tree, rest: tuple[Tree, ...]) -> Tree:
    values, treedef = flatten(tree)
    columns = [*first, values]
    for i, other in enumerate(rest):
        call = "tree.map(fn, tree, " + ", ".join(f"rest[{j}]" for j in range(len(rest))) + ")"
        check_same(treedef, other, call=call, name=f"rest[{i}]")
        columns.append(leaves(other))
    return optree.tree_unflatten(treedef, [fn(*row) for row in zip(*columns, strict=True)])


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    # A single leaf has the empty path.
    shown = ", ".join(n or "the tree itself as a leaf" for n in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _short(treedef: TreeDef) -> str:
    text = str(treedef)
    return text if len(text) <= 400 else text[:400] + " ..."
