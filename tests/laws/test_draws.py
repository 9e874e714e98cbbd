"""The law of draws: a program that draws is, in any layout, the plain function with the same numbers, or refused."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st

import fx_feather as ff
from tests.laws.drawn import BATCH_DIMS, FILE, TEMPLATE, Program, Writer, programs
from tests.laws.test_programs import REMAT, differences, example, places

GROUPS, CI, DEEP = 3, 12, 300
SEED, STEP = 5, 2

DRAWN = [
    "F.dropout({x}, 0.3)", "{x} * torch.rand_like({x})", "{x} + 0.1 * torch.randn_like({x})",
    "{x} * torch.bernoulli({x}.detach().sigmoid())", "{x} * torch.rand({x}.shape, dtype={x}.dtype)",
    "F.dropout({x} * 1.0, 0.2, inplace=True)", "{x} + torch.empty_like({x}).uniform_(-0.1, 0.1)",
    "ff.random.dropout(ff.random.key(3), {x}, 0.5)",
    "{x} * ff.random.normal(ff.random.fold_in(ff.random.key(3), 1), {x})",
    "F.dropout({x}, 0.3) + F.dropout({x}, 0.3)", "torch.rand_like({x}).lt(0.8).to({x}.dtype) * {x}",
]  # fmt: skip


class Drawing(Writer):
    """Writes a draw for every other statement or so."""

    def statement(self) -> None:
        if not self.draw(st.booleans()):
            super().statement()
            return
        x = self.value()
        assert x is not None
        self.write("draw", self.pick(DRAWN).format(x=x[0]), x[1], x[0])


def plain(program: Program, params: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by torch.autograd, with the numbers of the step."""
    leaves = {k: v.clone().requires_grad_(True) for k, v in params.items()}
    with ff.random.seeded(SEED, STEP):
        total, count = program.loss()(leaves, batch)
    loss = total / count
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach()), {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in leaves.items()}


def holds(program: Program, mesh: ff.Mesh, layout: ff.Layout, remat: str) -> bool:
    """Whether the program compiles in that layout; then it must be right, and if not, the message names a line."""
    params, batch = ff.init(TEMPLATE, 3), example(1, 1)
    want = plain(program, params, batch)
    how: dict[str, Any] = {"template": TEMPLATE, "mesh": mesh, "layout": layout, "batch": batch, "remat": remat}
    try:
        step = ff.compile_step(program.loss(), ff.sgd(lr=1.0), batch_dims=BATCH_DIMS, seed=SEED, **how)
        new, metrics = step.run_whole(ff.State(params, step.init().opt, STEP, True), batch)
    except ff.FeatherError as e:
        if FILE not in str(e):
            raise AssertionError("the message names no line of the program") from e
        return False
    scale = max([1.0, *(float(g.norm()) for g in want[1].values())])
    wrong = differences((metrics["loss"], {k: params[k] - new.params[k] for k in params}), want, scale)
    assert not wrong, f"on {mesh} with {layout}, remat={remat!r}: " + "; ".join(wrong)
    return True


@pytest.mark.parametrize("group", range(GROUPS))
def test_any_program_that_draws_is_itself_in_any_layout(group: int, request: pytest.FixtureRequest) -> None:
    compared, drawn = 0, 0

    @seed(group)
    @settings(max_examples=DEEP if request.config.getoption("--deep") else CI, derandomize=False)
    @given(programs(kind=Drawing, most=7), places(), st.sampled_from(REMAT))
    def law(program: Program, place: tuple[ff.Mesh, ff.Layout], remat: str) -> None:
        nonlocal compared, drawn
        assume("draw" in program.families)
        drawn += 1
        compared += holds(program, *place, remat)

    law()
    assert compared >= 0.4 * drawn, f"{compared} of {drawn} programs were compared, the others refused"
