"""What users test their own models with: the strategies draw what they say, and the law sees what it should."""

import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import fx_feather as ff
from fx_feather import testing
from fx_feather.errors import FeatherError
from fx_feather.models import llama
from fx_feather.simulate import Simulator

EXAMPLE = {"x": torch.zeros(6, 4), "label": torch.tensor([0, 0, 0, 0, 0, 9]), "on": torch.tensor([True, False] * 3)}


@given(mesh=testing.meshes(12, ("a", "b", "c"), min_size=2))
def test_meshes_stay_within_their_size(mesh: ff.Mesh) -> None:
    assert 2 <= mesh.size <= 12
    assert mesh.axes == tuple(a for a in "abc" if a in mesh)


@given(data=st.data())
def test_layouts_split_evenly(data: st.DataObject) -> None:
    sizes = {"batch": 6, "heads": 4, "kv_heads": 2, "mlp": 8, "residual_seq": 4}
    mesh, layout = data.draw(testing.parallelisms(8, ("dp", "tp"), sizes=sizes))
    layout.check_axes(mesh)
    for dim, n in sizes.items():
        assert n % mesh.count(layout.compute.get(dim, ())) == 0


@given(spec=testing.specs((4, 6), ff.Mesh(a=2, b=2), partial=False))
def test_specs_fit_their_tensor(spec: ff.P) -> None:
    assert len(spec.padded(2)) == 2
    assert not spec.partial


@given(batch=testing.batches(EXAMPLE, {"label": -100}))
def test_batches_are_like_the_example(batch: dict[str, torch.Tensor]) -> None:
    for name, like in EXAMPLE.items():
        assert (batch[name].shape, batch[name].dtype) == (like.shape, like.dtype)
    counted = batch["label"] != -100
    assert counted.any()
    assert (batch["label"][counted] >= 0).all() and (batch["label"][counted] <= 9).all()


def test_strategies_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis.strategies", None)
    with pytest.raises(FeatherError, match="pip install hypothesis"):
        testing.meshes()


TEMPLATE = {"up": ff.Param("embed mlp", (5, 8)), "down": ff.Param("mlp embed", (8, 5), ff.zeros())}


def loss(params, batch):
    hidden = ff.constrain(torch.tanh(batch["x"] @ params["up"]), "batch mlp")
    error = hidden @ params["down"] - batch["y"]
    return error.square().sum(), torch.tensor(batch["x"].shape[0])


@settings(max_examples=8)
@given(
    parallelism=testing.parallelisms(8, ("dp", "tp"), sizes={"batch": 8, "mlp": 8}),
    batch=testing.batches({"x": torch.zeros(8, 5), "y": torch.zeros(8, 5)}),
)
def test_my_model(parallelism, batch):
    mesh, layout = parallelism
    testing.assert_equivalent(
        loss,
        template=TEMPLATE,
        batch=batch,
        batch_dims="batch embed",
        mesh=mesh,
        layout=layout,
        optimizer=ff.adamw(lr=1e-2),
    )


def test_any_function_may_be_compared() -> None:
    settings = {"template": TEMPLATE, "batch_dims": "batch embed", "batch": torch.ones(4, 5)}
    layout = ff.Layout(compute={"mlp": "tp"})
    testing.assert_equivalent(
        lambda p, b: {"h": (b @ p["up"]).relu(), "n": b.sum()}, mesh=ff.Mesh(tp=4), layout=layout, **settings
    )


def test_a_rank_that_drifts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank is right, and it is the one that whole values are read from."""
    right = Simulator._collective

    def wrong(self, c, n, env):
        return [x + rank if c.name == "psum" else x for rank, x in enumerate(right(self, c, n, env))]

    monkeypatch.setattr(Simulator, "_collective", wrong)
    with pytest.raises(AssertionError, match=r"differs between rank 0 and ranks \[1\]"):
        testing.assert_equivalent(
            loss,
            template=TEMPLATE,
            batch={"x": torch.ones(4, 5), "y": torch.ones(4, 5)},
            batch_dims="batch embed",
            mesh=ff.Mesh(dp=2),
            layout=ff.Layout(compute={"batch": "dp"}),
        )


@pytest.mark.parametrize("seed", range(4))
def test_what_is_left_of_gradients_that_cancel_is_no_difference(seed: int) -> None:
    """An embedding of one number is normed to its sign: attention's gradients are nothing but rounding."""
    cfg = llama.LlamaConfig(vocab=2, layers=1, embed=1, heads=1, kv_heads=1, mlp=1, head_dim=4, dtype=torch.float64)
    tokens, targets = torch.randint(0, 2, (2, 2, 2), generator=torch.Generator().manual_seed(seed))
    testing.assert_equivalent(
        llama.loss(cfg),
        template=llama.template(cfg),
        batch={"tokens": tokens, "targets": targets, "positions": torch.arange(2).expand(2, 2).contiguous()},
        mesh=ff.Mesh(),
        layout=ff.Layout(),
        optimizer=ff.adamw(lr=1e-2),
    )


def test_a_small_gradient_that_is_lost_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what rounding explains is let through: a gradient of 1e-5 of another is none of that."""
    template = {"large": ff.Param("_", (4,)), "small": ff.Param("_", (4,))}

    def loss(params, batch):
        return ((params["large"] + 1e-5 * params["small"]) * batch).sum(), torch.tensor(4)

    settings = {"template": template, "batch": torch.ones(4), "batch_dims": "_", "optimizer": ff.adamw(lr=1e-2)}
    settings |= {"mesh": ff.Mesh(), "layout": ff.Layout(), "steps": 1}
    testing.assert_equivalent(loss, **settings)
    gather = ff.Step.gather

    def lossy(self, values, types):
        wholes = gather(self, values, types)
        return [x.where(x.abs() > 1e-4, 0) for x in wholes] if len(wholes) == len(template) * 3 + 1 else wholes

    monkeypatch.setattr(ff.Step, "gather", lossy)
    with pytest.raises(AssertionError, match=r"optimizer state.*'mu'.*'small'"):
        testing.assert_equivalent(loss, **settings)
