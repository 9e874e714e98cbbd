"""A step whose update would not be finite is refused by name, and leaves its state as it was, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import finite, tree
from fx_feather.errors import NonFiniteError, OptimizerError
from fx_feather.optim import leaf

PARTS = ("got:", "problem:", "rule:", "fix:")
BATCH = torch.linspace(-1, 1, 16).reshape(4, 4)


def stepped(
    optimizer: Any, mesh: ff.Mesh | None = None, loss: Any = None, dtype: torch.dtype = torch.float32, **options: Any
) -> ff.Step:
    def plain(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = (batch.to(params["w"].dtype) @ params["w"]).float().square().sum() + (0 * params["idle"].float()).sum()
        return out, torch.tensor(batch.shape[0])

    template = {
        "idle": ff.Param("embed", (4,), ff.ones(), dtype),
        "w": ff.Param("embed mlp", (4, 2), ff.normal(1.0), dtype),
    }
    return ff.compile_step(
        loss or plain,
        optimizer,
        template=template,
        mesh=mesh or ff.Mesh(),
        layout=layouts.single() if mesh is None else layouts.fsdp("dp"),
        batch=BATCH,
        batch_dims="batch embed",
        device="cpu",
        **options,
    )


def by_hand(update: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> ff.Transform:
    """An optimizer of one's own, that keeps the number of the step and the last gradients."""

    def init(params: Any) -> Any:
        return {"t": torch.zeros((), dtype=torch.int64), "last": tree.map(torch.zeros_like, params)}

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        new = tree.map(lambda g, p: update(g, p, state["t"]) - p, grads, params)
        return new, {"t": state["t"] + 1, "last": grads}

    return ff.Transform(init, step)


def by_parts(rate: Callable[[torch.Tensor], torch.Tensor]) -> ff.Transform:
    """An optimizer made of the package's own blocks, with a rate of its own."""

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, treedef = tree.flatten(grads)
        updates = leaf.scaled.each([(g, rate(state["t"])) for g in leaves])
        return tree.unflatten(treedef, updates), {"t": state["t"] + 1}

    return ff.Transform(lambda params: {"t": torch.zeros((), dtype=torch.float64)}, step)


def aux_loss(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    out = (batch @ params["w"]).square().sum() + (0 * params["idle"]).sum()
    load = batch.sum(1).log().sum()
    return out, torch.tensor(batch.shape[0]), {"load": load.detach(), "fine": batch.sum()}


def nudged(params: Any, aux: Any) -> Any:
    # A NaN compares as false: what comes out is finite, and wrong.
    return {**params, "idle": torch.where(aux["load"] > 0, params["idle"] + 1, params["idle"] - 1)}


#: What goes wrong, after how many good steps, and what the message names.
CASES: dict[str, tuple[Callable[..., ff.Step], int, str]] = {
    "a rate that is NaN": (lambda **k: stepped(ff.sgd(lambda t: torch.sqrt(1.0 - t) * 0.01), **k), 2, "nan at step 2"),
    "a rate that is infinite": (
        lambda **k: stepped(ff.adamw(lambda t: float("inf") if t == 1 else 0.1), **k),
        1,
        "inf at step 1",
    ),
    "a rate by hand": (lambda **k: stepped(by_parts(lambda t: -(1.0 - t).sqrt()), **k), 2, "factor of scale is nan"),
    "a rate that overflows": (
        lambda **k: stepped(by_parts(lambda t: 1e39 * t), **k),
        1,
        "factor of scale is 1e+39, which is more than torch.float32 holds",
    ),
    "a division by zero": (
        lambda **k: stepped(by_hand(lambda g, p, t: p - 0.1 * g / g.norm()), **k),
        0,
        "params['idle']",
    ),
    "a root of a negative value": (
        lambda **k: stepped(by_hand(lambda g, p, t: (p - 2 * t).sqrt()), **k),
        0,
        "params['w']",
    ),
    "a parameter that overflows": (
        lambda **k: stepped(by_hand(lambda g, p, t: p * 1e39), **k),
        0,
        "params['idle'] (and 1 more)",
    ),
    "a parameter that overflows its dtype": (
        lambda **k: stepped(by_hand(lambda g, p, t: p * 1e39), dtype=torch.bfloat16, **k),
        0,
        "params['idle']",
    ),
    "a rate within an update by hand": (
        lambda **k: stepped(by_hand(lambda g, p, t: p - (1.0 - t).sqrt() * 0.1 * g), **k),
        2,
        "params['idle'] (and 1 more)",
    ),
    "auxiliary values": (lambda **k: stepped(ff.sgd(0.1), loss=aux_loss, adjust=nudged, **k), 0, "aux['load']"),
}


def state_of(state: ff.State) -> list[torch.Tensor]:
    return tree.leaves((state.params, state.opt))


def broken(step: ff.Step, real: bool, tries: int = 6) -> tuple[int, str]:
    """After how many steps a step was refused, and its message: the law is that a state is finite, or as it was."""
    state = step.init(seed=1)
    for i in range(tries):
        before = [x.clone() for x in state_of(state)]
        given = state
        try:
            state, _ = step(state, step.shard(BATCH)) if real else step.simulate(state, BATCH)
        except (NonFiniteError, OptimizerError) as error:
            assert all(torch.equal(a, b) for a, b in zip(before, state_of(given), strict=True)), "the state changed"
            # It is still good for a step: the same one is refused again.
            with pytest.raises(type(error)):
                _ = step(given, step.shard(BATCH)) if real else step.simulate(given, BATCH)
            return i, str(error)
        bad = [
            p
            for p, x in zip(tree.paths((state.params, state.opt)), state_of(state), strict=True)
            if not x.isfinite().all()
        ]
        assert not bad, f"step {i} gave {bad} that are not finite, and said nothing"
    return tries, ""


@pytest.mark.parametrize("way", ["run", "simulate", "ranks"])
@pytest.mark.parametrize("name", CASES)
def test_an_update_that_is_not_finite_is_refused(name: str, way: str) -> None:
    make, good, named = CASES[name]
    steps, text = broken(make(mesh=ff.Mesh(dp=2)) if way == "ranks" else make(), real=way == "run")
    assert steps == good, text
    assert named in text and all(part in text for part in PARTS), text
    assert f"step {good}" in text and ("the state is unchanged" in text or "nothing was updated" in text)


def test_statistics_that_are_not_finite() -> None:
    step = stepped(ff.adamw(0.1))
    state = step.init()
    state.opt["mu"]["w"][0, 0] = float("nan")
    with pytest.raises(NonFiniteError) as error:
        step.simulate(state, BATCH)
    assert "first new value that is not finite: params['w']" in str(error.value)


#: What is not looked at any more, and a case that then goes wrong without a word.
PLANTED = {
    "numbers": ({"check_numbers": lambda *_: None, "is_moderate": lambda *_: True}, "a rate by hand"),
    "overflow": ({"check_numbers": lambda *_: None, "is_moderate": lambda *_: True}, "a rate that overflows"),
    "new values": ({"refuse_values": lambda *_: None}, "a division by zero"),
    "new values by hand": ({"refuse_values": lambda *_: None}, "a rate within an update by hand"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_the_law_sees_a_look_that_is_left_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out, name = PLANTED[fault]
    for function, instead in left_out.items():
        monkeypatch.setattr(finite, function, instead)
    with pytest.raises(AssertionError, match="not finite, and said nothing"):
        broken(CASES[name][0](), real=True)


def test_auxiliary_values_that_are_not_looked_at_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "refuse_values", lambda *_: None)
    assert broken(CASES["auxiliary values"][0](), real=True) == (6, "")


def test_the_optimizers_of_the_package_write_over_the_old_values_at_once() -> None:
    chain = ff.chain(ff.clip_by_global_norm(1.0), ff.adamw(ff.warmup_cosine(0.1, 2, 9)))
    assert all(stepped(o)._advance.updates.numbers.bounded for o in (ff.sgd(0.1), ff.sgd(0.1, momentum=0.9), chain))
    assert not stepped(by_hand(lambda g, p, t: p - 0.1 * g))._advance.updates.numbers.bounded


def test_a_narrow_parameter_that_overflows_is_found_before_the_old_one_goes() -> None:
    step = stepped(ff.sgd(lr=1e7), dtype=torch.float16)
    state = step.init(seed=0)
    before = state.params["w"].clone()
    with pytest.raises(NonFiniteError, match=r"new value that is not finite: params\['w'\]"):
        step.simulate(state, BATCH)
    with pytest.raises(NonFiniteError):
        step(state, BATCH)
    assert torch.equal(state.params["w"], before)
