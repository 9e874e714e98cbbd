"""A state knows how its parts are split; a program's text holds the values of its constants."""

import dataclasses
from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import step as step_module
from fx_feather import tree
from fx_feather.errors import BatchError, ShapeError, StateError
from fx_feather.program import constant_text

PARTS = ("got:", "problem:", "rule:", "fix:")


def stepped(mesh: ff.Mesh | None = None, layout: ff.Layout | None = None, lr: float = 0.1, size: int = 4) -> ff.Step:
    def loss(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total = sum((batch @ w).square().sum() for w in params.values())
        return total, torch.tensor(batch.shape[0])

    return ff.compile_step(
        loss,
        ff.adamw(lr),
        template={f"w{i:02}": ff.Param("embed mlp", (size, 4)) for i in range(20)},
        mesh=mesh or ff.Mesh(dp=1, tp=1),
        layout=layout or layouts.fsdp("dp"),
        batch=torch.ones(4, size),
        batch_dims="batch embed",
        device="cpu",
    )


def check_parts(error: Exception) -> str:
    text = str(error)
    assert all(part in text for part in PARTS), text
    return text


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process were one rank of several: states are local parts."""
    monkeypatch.setattr(step_module.Step, "local", property(lambda self: True))


def test_parts_of_another_layout_with_equal_shapes_are_one_message(ranks: None) -> None:
    state = stepped().init()
    other = stepped(layout=layouts.tp("tp"))
    with pytest.raises(StateError) as error:
        other(state, torch.ones(4, 4))
    text = check_parts(error.value)
    assert "params['w00'] is f32[4@dp, 4], not f32[4, 4@tp] (and 59 more leaves)" in text
    assert "step.shard_state(other.whole(state))" in text and len(text.splitlines()) < 8
    assert state.params is not None


def test_parts_of_another_mesh_with_equal_shapes_are_refused(ranks: None) -> None:
    state = stepped().init()
    other = stepped(ff.Mesh(dp=1))
    with pytest.raises(StateError, match=r"it was made on Mesh\(dp=1, tp=1\), not on Mesh\(dp=1\)"):
        other(state, torch.ones(4, 4))


def test_a_step_compiled_again_goes_on_with_a_state(ranks: None) -> None:
    state, _ = stepped()(stepped(lr=0.2).init(), torch.ones(4, 4))
    assert state.step == 1 and state.split is not None
    state, _ = stepped(lr=0.3)(state, torch.ones(4, 4))
    # Who builds a state of tensors alone says nothing of their split.
    again, _ = stepped()(ff.State(state.params, state.opt, 5, False), torch.ones(4, 4))
    assert again.step == 6


def test_whole_states_fit_any_mesh() -> None:
    one, two = stepped(), stepped(ff.Mesh(dp=2), layouts.zero1("dp"))
    state, _ = one.simulate(one.init(), torch.ones(4, 4))
    state, _ = two.simulate(state, torch.ones(4, 4))
    assert state.step == 2
    assert one.whole(state) is state and one.shard_state(state) is state


def test_whole_values_where_parts_belong_are_one_message(ranks: None) -> None:
    two = stepped(ff.Mesh(dp=2))
    whole = stepped().init()
    with pytest.raises(ShapeError) as error:
        two.check_leaves(
            tree.leaves(whole.params), two.params.at_rest(), "params", two.params.treedef, False, "step(state, batch)"
        )
    text = check_parts(error.value)
    assert "params['w00'] is f32[4, 4], not f32[2, 4]" in text and "and 12 more" in text
    assert "step.shard_state(state)" in text and len(text.splitlines()) < 16


def test_parts_are_not_cut_again(ranks: None) -> None:
    step = stepped()
    with pytest.raises(StateError, match="its values are local parts already"):
        step.shard_state(step.init())


def test_a_state_that_was_taken_is_not_cut() -> None:
    step = stepped()
    state = step.init()
    state.take()
    with pytest.raises(StateError, match="given to an earlier step already"):
        step.shard_state(state)


def test_rows_of_ones_own() -> None:
    step, rows = stepped(), torch.arange(16.0).view(4, 4)
    assert torch.equal(step.from_local(rows), step.shard(rows))
    with pytest.raises(BatchError, match=r"from_local\(batch\), leaf batch"):
        step.from_local(rows[:3])


def weighted(first: float, dtype: torch.dtype = torch.float32) -> ff.Step:
    def loss(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.tensor([first, 1.0, 1.0, 1.0], dtype=dtype)
        return ((batch * weight) @ params["w"]).square().sum(), torch.tensor(batch.shape[0])

    return ff.compile_step(
        loss,
        ff.sgd(lr=0.1),
        template={"w": ff.Param("embed mlp", (4, 8), dtype=torch.float64)},
        mesh=ff.Mesh(dp=2),
        layout=layouts.ddp("dp"),
        batch=torch.ones(4, 4, dtype=torch.float64),
        batch_dims="batch embed",
    )


def test_programs_that_differ_in_a_constant_differ_in_their_fingerprint() -> None:
    one, nine, wide = weighted(1.0), weighted(9.0), weighted(1.0, torch.float64)
    prints = {s.program.fingerprint() for s in (one, nine, wide)}
    assert len(prints) == 3
    assert one.program.fingerprint() == weighted(1.0).program.fingerprint()
    assert "constant f32[4] sha256" in one.program.text()


@pytest.mark.parametrize(
    "values",
    [
        (torch.tensor(3), torch.tensor(4)),
        (torch.tensor([]), torch.tensor([[]])),
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
        (torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([1.5])),
        (torch.arange(4.0).view(2, 2).T, torch.arange(4.0).view(2, 2)),
    ],
    ids=str,
)
def test_constants_of_any_kind_are_hashed(values: tuple[torch.Tensor, torch.Tensor]) -> None:
    one, other = values
    assert constant_text(one) == constant_text(one.clone()) != constant_text(other)


def test_what_a_state_carries_is_carried_on() -> None:
    step = stepped()
    state, _ = step.simulate(step.init(seed=7), torch.ones(4, 4))
    assert state.seed == 7 and dataclasses.replace(state).seed == 7
