"""Small functions that nobody would write on purpose: each equals one device, or is refused with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather.testing import assert_equivalent

TEMPLATE = {"w": ff.Param("embed mlp", (6, 6), ff.normal(0.5))}
BATCH = {"x": torch.linspace(-1, 1, 24).view(4, 6)}
SETUP: dict[str, Any] = {
    "template": TEMPLATE,
    "mesh": ff.Mesh(dp=2),
    "layout": ff.Layout(compute={"batch": "dp"}),
    "batch": BATCH,
    "batch_dims": "batch _",
}


def _keyword_default(k: float) -> Callable[..., Any]:
    def layer(w: torch.Tensor, x: torch.Tensor, *, scale: float = k) -> torch.Tensor:
        return torch.tanh(x @ w) * scale

    return layer


def _closed_over(k: Any) -> Callable[..., Any]:
    def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w) + (1.0 if isinstance(k[0], float) else 0.0)

    return layer


def _sign_of(k: float) -> Callable[..., Any]:
    def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.copysign(torch.ones_like(x), torch.full_like(x, k)) * torch.tanh(x @ w)

    return layer


@pytest.mark.parametrize(
    ("make", "values"),
    [(_keyword_default, (1.0, 2.0, 3.0)), (_closed_over, ((1,), (1.0,))), (_sign_of, (0.0, -0.0))],
    ids=["keyword default", "1 and 1.0 in a tuple", "0.0 and -0.0"],
)
def test_blocks_that_differ_in_what_they_hold_are_different(make: Callable[[Any], Any], values: Any) -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for k in values:
            x = ff.block(make(k))(params["w"], x)
        return x.sum() + (x**2).sum(), torch.tensor(x.shape[0])

    assert_equivalent(loss, **SETUP)


def test_a_block_sees_what_its_list_holds_at_each_call() -> None:
    def loss(params: Any, batch: Any) -> Any:
        held = [1.0]
        layer = ff.block(lambda w, x: torch.tanh(x @ w) * held[0])
        x = layer(params["w"], batch["x"])
        held[0] = 4.0
        return (layer(params["w"], x) ** 2).sum(), torch.tensor(x.shape[0])

    assert_equivalent(loss, **SETUP)


@pytest.mark.parametrize(
    "draw",
    [lambda w: torch.rand(6), lambda w: torch.rand_like(w), lambda w: torch.bernoulli(w.detach().sigmoid())],
    ids=["rand", "rand_like", "bernoulli"],
)
def test_random_numbers_are_those_of_one_device_on_whole_values_too(
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return (batch["x"] @ params["w"] * draw(params["w"]).sum()).sum(), torch.tensor(4)

    assert_equivalent(loss, **SETUP)


def test_a_copy_for_the_backward_is_made_before_the_forward_writes_over_it() -> None:
    # Its kernel takes the logarithm in place, of what the backward divides by.
    def loss(params: Any, batch: Any) -> Any:
        logits = batch["x"] @ params["w"]
        each = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["x"].sigmoid(), reduction="none")
        return each.sum(), torch.tensor(logits.shape[0])

    assert_equivalent(loss, **SETUP)
    assert_equivalent(loss, **SETUP, optimizer=ff.sgd(lr=0.1), remat="full")


def test_one_hot_in_a_loss_with_gradients() -> None:
    def loss(params: Any, batch: Any) -> Any:
        rows = torch.nn.functional.one_hot(batch["i"], 6).to(params["w"].dtype)
        return (rows @ params["w"]).pow(2).sum(), torch.tensor(rows.shape[0])

    batch = {"i": torch.tensor([0, 5, 2, 2])}
    assert_equivalent(loss, **{**SETUP, "batch": batch, "batch_dims": "batch"})


def test_tables_of_a_store_that_no_update_brings_together_are_named() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return (batch["x"] @ params["w"]).sum(), torch.tensor(4)

    layout = ff.Layout(compute={"batch": "dp"}, store=ff.Store(params={"embed": "dp"}, opt={"mlp": "dp"}))
    with pytest.raises(ff.FeatherError, match=r"axis 'dp' splits embed in the one and mlp in the other") as error:
        ff.compile_step(loss, ff.adamw(lr=0.1), **{**SETUP, "layout": layout})
    assert "Store(params=..., opt=...)" in str(error.value)


def _step(**changed: Any) -> ff.Step:
    def loss(params: Any, batch: Any) -> Any:
        return (batch["x"] @ params["w"]).sum(), torch.tensor(4)

    return ff.compile_step(loss, ff.adamw(lr=0.1), **{**SETUP, **changed})


@pytest.mark.parametrize("device", ["tpu", "cuda:99", 3])
def test_a_device_that_is_not_there_is_refused_before_anything_runs_on_it(device: Any) -> None:
    with pytest.raises(ff.FeatherError, match="a program runs on cpu"):
        _step(device=device)


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ff.FeatherError, match="device is 'cuda'"):
        _step(device="cuda")


@pytest.mark.parametrize("wrong", [None, {"w": torch.ones(6, 6)}])
def test_what_is_no_state_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ff.FeatherError, match="is not a State"):
        _step().simulate(wrong, BATCH)


@pytest.mark.parametrize(("dims", "why"), [("batch batch", "'batch' is named twice"), ({"x": 3}, "3 is not a string")])
def test_dims_of_a_batch_that_are_no_names_are_refused(dims: Any, why: str) -> None:
    with pytest.raises(ff.FeatherError, match=why):
        _step(batch_dims=dims)


@pytest.mark.parametrize(("x", "dims"), [(torch.ones(2), None), (torch.ones(2), ["batch"]), (3.0, "")])
def test_constrain_names_what_is_no_tensor_or_no_string(x: Any, dims: Any) -> None:
    with pytest.raises(ff.FeatherError, match="is not a"):
        ff.constrain(x, dims)


def test_an_optimizer_state_of_another_dtype_is_refused_by_name() -> None:
    step = ff.compile_step(
        lambda p, b: ((b @ p["w"]).sum(), torch.tensor(2)),
        ff.adamw(lr=0.1),
        template={"w": ff.Param("embed", (4,))},
        mesh=ff.Mesh(),
        layout=ff.Layout(),
        batch=torch.ones(2, 4),
        batch_dims="batch embed",
    )
    state = step.init(seed=0)
    wide = ff.tree.map(lambda x: x.double(), state.opt)
    with pytest.raises(ff.FeatherError, match=r"state.opt\['mu'\]\['w'\]"):
        step.simulate(ff.State(state.params, wide, 0, True), torch.ones(2, 4))


@pytest.mark.parametrize("rows", [8, 6, 12])
def test_the_batch_that_a_message_names_compiles(rows: int) -> None:
    """Three microbatches on two ranks: nine rows would be refused next."""

    def loss(params, batch):
        return ((batch @ params["w"]) ** 2).sum(), torch.tensor(batch.shape[0])

    settings = {"template": {"w": ff.Param("embed _", (4, 4))}, "mesh": ff.Mesh(dp=2), "layout": layouts.ddp("dp")}
    settings |= {"batch": torch.zeros(rows, 4), "batch_dims": "batch _", "accumulate": 3}
    if rows % 6:
        with pytest.raises(ff.FeatherError, match="a batch of 6 or 12"):
            ff.compile_step(loss, ff.sgd(0.1), **settings)
    else:
        ff.compile_step(loss, ff.sgd(0.1), **settings)


def test_a_norm_that_overflows_is_not_said_to_be_the_loss() -> None:
    def loss(params, batch):
        return 1e25 * (params["w"] * batch).sum(), torch.tensor(4)

    settings = {"template": {"w": ff.Param("_", (4,))}, "mesh": ff.Mesh(), "layout": ff.Layout()}
    step = ff.compile_step(loss, ff.sgd(0.1), **settings, batch=torch.ones(4), batch_dims="_")
    with pytest.raises(ff.FeatherError, match="only the norm of all, which is too large for its dtype"):
        step.simulate(step.init(), torch.ones(4))
