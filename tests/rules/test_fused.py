"""Fused projections under tensor parallel: pieces in a dim of their own are split with nothing sent for it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fx_feather as ff
import layouts
from fx_feather import testing

F64 = torch.float64
BATCH = torch.randn(4, 6, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
FUSED = {
    "gate_up": ff.Param("embed _ mlp", (8, 2, 12), dtype=F64, init=ff.normal(0.5)),
    "qkv": ff.Param("embed _ heads head_dim", (8, 3, 4, 2), dtype=F64, init=ff.normal(0.5)),
    "o": ff.Param("heads head_dim embed", (4, 2, 8), dtype=F64, init=ff.normal(0.5)),
    "down": ff.Param("mlp embed", (12, 8), dtype=F64, init=ff.normal(0.5)),
}
APART = {
    **{name: ff.Param("embed mlp", (8, 12), dtype=F64) for name in ("gate", "up")},
    **{name: ff.Param("embed heads head_dim", (8, 4, 2), dtype=F64) for name in "qkv"},
    **{name: FUSED[name] for name in ("o", "down")},
}


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: Any, x: torch.Tensor) -> torch.Tensor:
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    return ff.constrain(x + torch.einsum("bhsd,hde->bse", out, p["o"]), "batch seq embed")


def fused(p: Any, x: torch.Tensor) -> Any:
    x = attended(*torch.einsum("bse,ephd->bpshd", x, p["qkv"]).unbind(1), p, x)
    gate, up = torch.einsum("bse,epm->bspm", x, p["gate_up"]).unbind(-2)
    return ((F.silu(gate) * up) @ p["down"]).square().sum(), torch.tensor(4)


def apart(p: Any, x: torch.Tensor) -> Any:
    x = attended(*(torch.einsum("bse,ehd->bshd", x, p[name]) for name in "qkv"), p, x)
    return ((F.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]).square().sum(), torch.tensor(4)


def by_chunks(p: Any, x: torch.Tensor) -> Any:
    gate, up = (x @ p["gate_up"]).chunk(2, -1)
    return ((F.silu(gate) * up) @ p["down"]).square().sum(), torch.tensor(4)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (ff.Mesh(tp=2), layouts.tp("tp")),
        (ff.Mesh(tp=4), layouts.tp("tp")),
        (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp_sp("tp") | ff.Layout(unused_ok=True)),
    ],
)
def test_fused_weights_are_one_device_and_send_what_separate_ones_do(mesh: ff.Mesh, layout: ff.Layout) -> None:
    settings: Any = {"mesh": mesh, "layout": layout, "batch": BATCH, "batch_dims": "batch seq embed"}
    testing.assert_equivalent(fused, template=FUSED, **settings)
    steps = [
        ff.compile_step(fn, ff.sgd(lr=0.1), template=template, **settings)
        for fn, template in ((fused, FUSED), (apart, APART))
    ]
    activations = [
        sum(c.sent_bytes for c in step.program.collectives("first") if "tp" in c.axes) for step in steps
    ]  # fmt: skip
    assert activations[0] == activations[1] > 0
    # The two weights are those of the other: one device makes the same of both.
    params = ff.init(FUSED, 1)
    cut = {
        "gate": params["gate_up"][:, 0],
        "up": params["gate_up"][:, 1],
        **dict(zip("qkv", params["qkv"].unbind(1), strict=True)),
    }
    assert torch.allclose(fused(params, BATCH)[0], apart(cut | {k: params[k] for k in ("o", "down")}, BATCH)[0])


def test_a_chunk_of_one_split_dim_says_so() -> None:
    template = {"gate_up": ff.Param("embed mlp", (8, 24)), "down": ff.Param("mlp embed", (12, 8))}
    with pytest.raises(ff.FeatherError, match=r"chunk.*\n") as e:
        ff.compile_step(
            by_chunks, ff.sgd(lr=0.1), template=template, mesh=ff.Mesh(tp=2), layout=layouts.tp("tp"),
            batch=BATCH.float(), batch_dims="batch seq embed",
        )  # fmt: skip
    assert "test_fused.py" in str(e.value) and "dim of their own" in str(e.value) and ".unbind(-2)" in str(e.value)
