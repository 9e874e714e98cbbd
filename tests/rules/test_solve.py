"""How axes are shared out among the factors of one dim, and whose they are when they split nothing."""

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import testing
from fx_feather.models import llama
from fx_feather.rules.solve import split_factors


@pytest.mark.parametrize(
    ("sizes", "mesh", "expected"),
    [
        ({"g": 4, "r": 3}, ff.Mesh(a=2), {"g": ("a",)}),
        ({"g": 2, "r": 4}, ff.Mesh(a=2, b=2), {"g": ("a",), "r": ("b",)}),
        ({"g": 1, "r": 4}, ff.Mesh(a=2), {"r": ("a",)}),
        ({"g": 1, "r": 4}, ff.Mesh(a=1), {"g": ("a",)}),
        ({"g": 2, "r": 4}, ff.Mesh(a=2, b=1), {"g": ("a", "b")}),
    ],
)
def test_the_major_factor_is_split_first(sizes, mesh, expected):
    assert split_factors(("g", "r"), mesh.axes, sizes, mesh) == expected


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_an_axis_of_one_rank_splits_one_key_head_too(kv_heads):
    cfg = llama.LlamaConfig(vocab=7, layers=1, embed=4, heads=2, kv_heads=kv_heads, mlp=4, dtype=torch.float64)
    batch = {name: torch.arange(6).view(2, 3) % 7 for name in ("tokens", "targets", "positions")}
    mesh, layout = ff.Mesh(dp=2, tp=1), layouts.fsdp("dp") | layouts.tp_sp("tp")
    testing.assert_equivalent(llama.loss(cfg), template=llama.template(cfg), batch=batch, mesh=mesh, layout=layout)
