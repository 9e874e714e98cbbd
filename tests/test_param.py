"""Parameters: templates are checked, and initial values are the same bits however they are cut."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fx_feather.param as module
from fx_feather.errors import FeatherError, ShapeError
from fx_feather.initializers import Initializer
from fx_feather.param import (
    BLOCK,
    Param,
    init,
    initial_block,
    initial_values,
    normal,
    ones,
    truncated_normal,
    uniform,
    zeros,
)

RANDOM = [normal(0.5), truncated_normal(0.5), truncated_normal(2.0, cut=0.5), uniform(-1.0, 3.0)]


@dataclasses.dataclass(frozen=True)
class index_bits:
    """Values that differ at every element, to see an element out of place."""

    def block(self, generator: torch.Generator, n: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(n).to(dtype) + torch.randint(0, 2**20, (1,), generator=generator)


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    bounds = [sorted((draw(st.integers(0, n + 2)), draw(st.integers(0, n + 2)))) for n in shape]
    return shape, tuple(slice(None) if draw(st.booleans()) else slice(lo, hi) for lo, hi in bounds)


@given(parts(), st.sampled_from([*RANDOM, index_bits(), ones()]), st.sampled_from([1, 2, 3, 7, 16, 64, 1000]))
def test_any_part_has_the_bits_of_the_whole(case: Any, rule: Initializer, block: int) -> None:
    shape, slices = case
    param = Param(" ".join("abcd"[: len(shape)]), shape, rule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        whole = initial_values(param, "['w']", 3)
        assert whole.shape == shape
        assert torch.equal(initial_values(param, "['w']", 3, slices), whole[slices])
        flat = [initial_block(param, "['w']", 3, i) for i in range(math.ceil(param.numel / block))]
        assert torch.equal(torch.cat([*flat, torch.empty(0)]).view(shape), whole)


@pytest.mark.parametrize("rule", RANDOM, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shards_of_a_large_parameter_gather_to_the_whole(rule: Initializer, dtype: torch.dtype) -> None:
    param = Param("embed mlp", (301, 703), rule, dtype)
    whole = init({"w": param}, seed=1)["w"]
    for dim, size in enumerate(param.shape):
        for ranks in (1, 2, 4, 8):
            n = math.ceil(size / ranks)
            cuts = [slice(i * n, (i + 1) * n) for i in range(ranks)]
            shards = [
                initial_values(param, "['w']", 1, (cut, slice(None)) if dim == 0 else (slice(None), cut))
                for cut in cuts
            ]
            assert torch.equal(torch.cat(shards, dim), whole)


def test_parameters_of_one_shape_and_seeds_are_distinct() -> None:
    template = {"layers": [{"a": Param("embed mlp", (40, 50)), "b": Param("embed mlp", (40, 50))} for _ in range(8)]}
    values = [w for seed in (0, 1) for layer in init(template, seed)["layers"] for w in layer.values()]
    assert len({v.numpy().tobytes() for v in values}) == 32
    flat = torch.stack([v.flatten() for v in values])
    # Independent as well: 2000 elements leave correlations of about 0.022.
    assert (torch.corrcoef(flat) - torch.eye(32)).abs().max() < 0.12


def test_blocks_of_one_parameter_are_distinct() -> None:
    param = Param("vocab", (4 * BLOCK,))
    blocks = initial_values(param, "['w']").view(4, BLOCK)
    assert (torch.corrcoef(blocks) - torch.eye(4)).abs().max() < 0.02


def test_values_do_not_depend_on_other_parameters_or_calls() -> None:
    alone = init({"b": Param("embed", (100,))})["b"]
    torch.manual_seed(5)
    assert torch.equal(init({"a": Param("embed", (7,)), "b": Param("embed", (100,))})["b"], alone)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    init({"w": Param("embed", (100,))})
    assert torch.equal(torch.get_rng_state(), before)


def test_a_narrow_or_wide_parameter_starts_at_its_float32_twin() -> None:
    single = init(Param("embed", (1000,)))
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(init(Param("embed", (1000,), dtype=dtype)), single.to(dtype))


def test_statistics() -> None:
    n = 400_000
    standard_error = 5 / math.sqrt(n)

    def values(rule: Initializer) -> torch.Tensor:
        return init(Param("a b", (400, 1000), rule)).double()

    x = values(normal(0.5))
    assert abs(x.mean()) < 0.5 * standard_error
    assert abs(x.std() - 0.5) < 0.5 * standard_error
    assert abs((x / 0.5).pow(4).mean() - 3) < 12 * standard_error
    x = values(uniform(-1.0, 3.0))
    assert x.min() >= -1
    assert x.max() <= 3
    assert abs(x.mean() - 1) < 2 * standard_error
    assert abs(x.std() - 4 / math.sqrt(12)) < 2 * standard_error
    for cut in (1.0, 3.0):
        x = values(truncated_normal(0.5, cut))
        inside = math.erf(cut / math.sqrt(2))
        density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
        assert x.abs().max() <= 0.5 * cut
        assert x.abs().max() > 0.5 * cut * 0.98
        assert abs(x.mean()) < 0.5 * standard_error
        assert abs(x.std() - 0.5 * math.sqrt(1 - 2 * cut * density / inside)) < 0.5 * standard_error
    assert values(zeros()).abs().max() == 0
    assert values(ones()).std() == 0


def drawn(monkeypatch: pytest.MonkeyPatch, param: Param, slices: tuple[slice, ...]) -> list[int]:
    """Which blocks are drawn for a part."""
    seen: list[int] = []

    def counted(param: Param, path: str, seed: int, index: int) -> torch.Tensor:
        seen.append(index)
        values = initial_block(param, path, seed, index)
        assert values.numel() <= BLOCK
        return values

    monkeypatch.setattr(module, "initial_block", counted)
    initial_values(param, "['w']", 0, slices)
    return seen


def test_only_touched_blocks_are_drawn_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Param("vocab embed", (8 * BLOCK // 64, 64))
    assert drawn(monkeypatch, rows, (slice(2 * BLOCK // 64, 4 * BLOCK // 64), slice(None))) == [2, 3]
    assert drawn(monkeypatch, rows, (slice(None), slice(3, 4))) == list(range(8))
    wide = Param("expert mlp", (6, 4 * BLOCK))
    columns = (slice(0, 6), slice(BLOCK, BLOCK + 10))
    assert drawn(monkeypatch, wide, columns) == [1, 5, 9, 13, 17, 21]
    assert drawn(monkeypatch, wide, (slice(2, 2), slice(None))) == []


def test_a_part_of_a_huge_parameter_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = Param("vocab embed", (10**9, 10**6))  # 4 PB: any temporary in proportion to the whole would fail
    assert len(drawn(monkeypatch, huge, (slice(10**8, 10**8 + 3), slice(500_000, 500_100)))) <= 6


def test_readable_values() -> None:
    rules = [normal(0.02), truncated_normal(0.02), uniform(-1, 1), zeros(), ones()]
    assert list(map(repr, rules)) == [
        "normal(std=0.02)",
        "truncated_normal(std=0.02, cut=3.0)",
        "uniform(low=-1, high=1)",
        "zeros()",
        "ones()",
    ]
    param = Param("embed _", [2, 3], ones(), torch.bfloat16)  # type: ignore[arg-type]
    assert repr(param) == "Param('embed _', (2, 3), init=ones(), dtype=torch.bfloat16)"
    assert param == Param("embed _", (2, 3), ones(), torch.bfloat16)
    assert hash(param) == hash(dataclasses.replace(param))
    assert (param.dim_names, param.numel) == (("embed", "_"), 6)
    assert Param("", ()).dim_names == ()


def test_scalar_parameters_have_one_value() -> None:
    assert init(Param("", (), ones())).shape == ()


BAD_PARAMS: list[tuple[dict[str, Any], list[str]]] = [
    ({"dims": "embed", "shape": (2, 3)}, ["1 dim names for 2 dims", "dims='embed _'"]),
    ({"dims": "embed mlp heads", "shape": (2, 3)}, ["3 dim names for 2 dims", "a shape of 3 dims"]),
    ({"dims": "embed 3d", "shape": (2, 3)}, ["'3d' is not a name"]),
    ({"dims": "embed,mlp", "shape": (2,)}, ["'embed,mlp' is not a name", "names and spaces only"]),
    ({"dims": "embed embed", "shape": (2, 2)}, ["'embed' names 2 dims"]),
    ({"dims": ("embed",), "shape": (2,)}, ["which is not a string"]),
    ({"dims": "embed", "shape": (-1,)}, ["not a sequence of integers of at least 0"]),
    ({"dims": "embed", "shape": (2.0,)}, ["not a sequence of integers of at least 0"]),
    ({"dims": "embed", "shape": 2}, ["shape 2 is not a sequence"]),
    ({"dims": "embed", "shape": (2,), "init": ones}, ["or is not called", "init=ff.normal(0.02)"]),
    ({"dims": "embed", "shape": (2,), "init": 0.02}, ["0.02 has no method block"]),
    ({"dims": "embed", "shape": (2,), "dtype": torch.int64}, ["torch.int64 is not a floating-point"]),
    ({"dims": "embed 3d", "shape": (-1,), "init": 1}, ["3 problems", "'3d' is not a name", "1 has no method block"]),
]


@pytest.mark.parametrize(("arguments", "said"), BAD_PARAMS, ids=lambda x: str(x)[:50])
def test_a_param_that_does_not_fit_says_all_that_is_wrong(arguments: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ShapeError) as caught:
        Param(**arguments)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: normal(0.0), "std is 0.0"),
        (lambda: normal(math.nan), "std is nan"),
        (lambda: truncated_normal(-1.0, cut=0), "2 problems"),
        (lambda: uniform(1.0, 1.0), "low < high"),
        (lambda: uniform(-math.inf, 1.0), "low and high are finite"),
    ],
)
def test_an_initialiser_checks_its_settings(make: Any, said: str) -> None:
    with pytest.raises(FeatherError, match=said):
        make()


def test_a_template_of_other_leaves_names_them_all() -> None:
    with pytest.raises(ShapeError) as caught:
        init({"a": Param("embed", (2,)), "b": [torch.ones(2), 3]})
    assert "template['b'][0] is not a Param" in str(caught.value)
    assert "template['b'][1] is not a Param" in str(caught.value)


def test_slices_are_checked() -> None:
    param = Param("embed mlp", (4, 6))
    with pytest.raises(ShapeError, match="1 slices for 2 dims"):
        initial_values(param, "['w']", 0, (slice(None),))
    with pytest.raises(ShapeError, match="the slice of dim 1 has step 2"):
        initial_values(param, "['w']", 0, (slice(None), slice(0, 6, 2)))


def test_an_initialiser_that_returns_another_shape_is_refused() -> None:
    class Short:
        def block(self, generator: torch.Generator, n: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(n - 1, dtype=dtype)

    with pytest.raises(ShapeError, match=r"shape \(3,\) and torch.float32, where \(4,\)"):
        init({"w": Param("embed", (4,), Short())})
