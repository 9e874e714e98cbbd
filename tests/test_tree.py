"""Pytrees: order, key paths, and the message when two structures differ."""

import dataclasses
import re
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fx_feather as ff
import layouts
from fx_feather import testing, tree
from fx_feather.errors import ShapeError
from fx_feather.param import Param

TREE = {"layers": [{"mlp": {"up": 1, "down": 2}}, None, (3, 4)], "embed": 5}

trees = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text("ab_'\"", min_size=1, max_size=3) | st.just("layers"), inner, max_size=3)
    ),
    max_leaves=12,
)


def test_paths_are_in_flatten_order_with_sorted_keys() -> None:
    assert tree.leaves(TREE) == [5, 2, 1, 3, 4]
    assert tree.paths(TREE) == [
        "['embed']",
        "['layers'][0]['mlp']['down']",
        "['layers'][0]['mlp']['up']",
        "['layers'][2][0]",
        "['layers'][2][1]",
    ]


def test_insertion_order_of_a_dict_does_not_matter() -> None:
    a, b = {"x": 1, "y": 2}, {"y": 2, "x": 1}
    assert tree.flatten(a) == tree.flatten(b)
    assert tree.map(lambda p, q: p - q, a, b) == {"x": 0, "y": 0}


@given(trees)
def test_flatten_is_undone_by_unflatten(value: tree.Tree) -> None:
    values, treedef = tree.flatten(value)
    assert tree.unflatten(treedef, values) == value
    assert tree.leaves(value) == values


@given(trees)
def test_each_path_leads_to_its_leaf(value: tree.Tree) -> None:
    for path, leaf in zip(tree.paths(value), tree.leaves(value), strict=True):
        assert eval("value" + path, {"value": value}) is leaf


@given(trees)
def test_map_with_path_visits_each_leaf_once(value: tree.Tree) -> None:
    seen: list[str] = []

    def visit(path: str, leaf: int) -> int:
        seen.append(path)
        return leaf

    same = tree.map_with_path(visit, value)
    assert (same, seen) == (value, tree.paths(value))


def test_a_param_and_a_bare_value_are_leaves() -> None:
    param = Param("embed mlp", (2, 3))
    assert tree.leaves({"w": param}) == [param]
    assert tree.paths(param) == [""]
    assert tree.leaves(None) == []


def test_map_names_missing_and_extra_paths() -> None:
    with pytest.raises(ShapeError) as caught:
        tree.map(lambda *x: x, TREE, TREE, {"layers": [{"mlp": {"up": 1}}, None, (3, 4)], "embed": 5, "head": 6})
    text = str(caught.value)
    assert text.startswith("tree.map(fn, tree, rest[0], rest[1])\n")
    assert "rest[1] with 5 leaves, where 5 are expected" in text
    assert re.search(r"missing: \['layers'\]\[0\]\['mlp'\]\['down'\]\n *extra:   \['head'\]\n", text)
    assert "fix:     add ['layers'][0]['mlp']['down']; remove ['head']" in text


def test_map_does_not_take_none_for_a_leaf() -> None:
    with pytest.raises(ShapeError, match=r"missing: \['x'\]"):
        tree.map(lambda a, b: a, {"x": 1, "y": 2}, {"x": None, "y": 2})


def test_map_tells_containers_apart() -> None:
    with pytest.raises(ShapeError, match="the containers differ in type"):
        tree.map(lambda a, b: a, {"x": [1, 2]}, {"x": (1, 2)})


def test_long_lists_of_paths_are_cut() -> None:
    with pytest.raises(ShapeError, match=r"\['k07'\] and 12 more"):
        tree.map(lambda a, b: a, {f"k{i:02d}": i for i in range(20)}, {})


def test_unflatten_counts_leaves() -> None:
    _, treedef = tree.flatten({"a": 1, "b": 2})
    with pytest.raises(ShapeError, match="3 leaves, but the definition has 2"):
        tree.unflatten(treedef, [1, 2, 3])


@tree.node
@dataclasses.dataclass(frozen=True)
class Layer:
    """Frozen, with a check that a spec in the place of a tensor would not pass."""

    up: Any
    down: Any

    def __post_init__(self) -> None:
        assert hasattr(self.up, "shape")


@dataclasses.dataclass(slots=True)
class Attention:
    heads: int
    wq: Any


tree.node(Attention, static=["heads"])


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_dataclass_is_a_node() -> None:
    x = {"mlp": Layer(torch.ones(2), torch.zeros(2)), "attn": Attention(4, torch.ones(3)), "pair": Pair(1, 2)}
    assert tree.paths(x) == ["['attn'].wq", "['mlp'].up", "['mlp'].down", "['pair'].first", "['pair'].second"]
    named = tree.map_with_path(lambda path, _: path, x)
    assert named["mlp"].up == "['mlp'].up" and named["attn"].heads == 4 and isinstance(named["pair"], Pair)
    with pytest.raises(ShapeError, match="differ in type"):
        tree.check_same(Attention(4, 1), Attention(8, 1), call="test")


def test_what_is_no_node_is_named() -> None:
    with pytest.raises(ShapeError, match="no dataclass"):
        tree.node(int)
    with pytest.raises(ShapeError, match="no field 'head'"):
        tree.node(Attention, static=["head"])


def test_a_dataclass_that_is_no_node_is_mended_by_the_decorator() -> None:
    @dataclasses.dataclass
    class Own:
        w: Any

    with pytest.raises(ShapeError, match=r"@ff\.tree\.node above the dataclass Own"):
        ff.init({"own": Own(Param("embed", (4,)))})


def test_a_model_of_dataclasses_is_one_device_in_every_layout() -> None:
    template = {
        "mlp": tree.unflatten(
            tree.structure(Layer(torch.ones(1), torch.ones(1))),
            [Param("embed mlp", (4, 8), dtype=torch.float64), Param("mlp embed", (8, 4), dtype=torch.float64)],
        ),
        "attn": Attention(2, Param("embed embed_out", (4, 4), dtype=torch.float64)),
    }

    def loss(params, batch):
        mlp, attn = params["mlp"], params["attn"]
        out = ff.block(lambda p, x: torch.relu(x @ p.up) @ p.down)(mlp, batch) + attn.heads * (batch @ attn.wq)
        return out.pow(2).sum(), torch.tensor(batch.shape[0])

    for layout in (layouts.fsdp("x"), layouts.tp("x"), layouts.ddp("x")):
        testing.assert_equivalent(
            loss,
            template=template,
            mesh=ff.Mesh(x=2),
            layout=layout,
            batch=torch.randn(4, 4, dtype=torch.float64),
            batch_dims="batch embed",
        )
