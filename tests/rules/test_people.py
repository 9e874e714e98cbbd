"""Small losses that people write: each equals plain torch.autograd in every layout, or is refused at its line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fx_feather as ff
import layouts

Loss = Callable[[Any, Tensor], Tensor]
D = torch.float64
LAYOUTS = {
    "fsdp": (ff.Mesh(dp=2), layouts.fsdp("dp")),
    "tp": (ff.Mesh(tp=2), layouts.tp("tp")),
    "fsdp and tp": (ff.Mesh(dp=2, tp=2), layouts.fsdp("dp") | layouts.tp("tp")),
}
#: One axis would split labels before and labels after.
REFUSED = {("chain_of_labels", "tp"), ("chain_of_labels", "fsdp and tp")}
#: A batch [batch, 4, 8]; w [embed 8, mlp 4]; k: kernels [mlp 4, embed 4, 3].
BATCH = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1), dtype=D)
TEMPLATE = {
    "w": ff.Param("embed mlp", (8, 4), dtype=D),
    "k": ff.Param("mlp embed _", (4, 4, 3), dtype=D),
}
LOSSES: dict[str, Loss] = {}


def loss(f: Loss) -> Loss:
    LOSSES[f.__name__] = f
    return f


@loss
def residual_convolution(p, x):
    return (x + F.relu(F.conv1d(x, p["k"], padding=1))).pow(2).sum() + p["w"].sum()


@loss
def batch_norm_network(p, x):
    h = F.conv1d(x, p["k"], padding=1)
    return (F.relu(F.batch_norm(h, None, None, training=True)) * h).sum() + p["w"].sum()


@loss
def instance_norm_network(p, x):
    h = F.instance_norm(F.conv1d(x, p["k"]))
    return (h * h.sigmoid()).sum() + p["w"].sum()


@loss
def pooled(p, x):
    h = F.conv1d(x, p["k"])
    return (F.max_pool1d(h, 2).sum() + F.avg_pool1d(h, 2).pow(2).sum()) + p["w"].sum()


@loss
def global_pool(p, x):
    return F.adaptive_avg_pool1d(F.conv1d(x, p["k"]), 1).pow(2).sum() + p["w"].sum()


@loss
def upsampled(p, x):
    return F.interpolate(F.conv1d(x, p["k"]), scale_factor=2, mode="linear").pow(2).sum() + p["w"].sum()


@loss
def transposed_convolution(p, x):
    return F.conv_transpose1d(x, p["k"], stride=2).pow(2).sum() + p["w"].sum()


@loss
def contrastive(p, x):
    h = x @ p["w"]
    return F.cosine_similarity(h, torch.tanh(h * 2 + 1), dim=-1).exp().sum() + p["k"].sum()


@loss
def triplet(p, x):
    h = x @ p["w"]
    return F.relu(F.pairwise_distance(h, h * 2) - F.pairwise_distance(h, h + 1) + 1).sum() + p["k"].sum()


@loss
def distances(p, x):
    h = x @ p["w"]
    return torch.cdist(h, h.cos()).sum() + p["k"].sum()


@loss
def robust(p, x):
    h = x @ p["w"]
    return (h.quantile(0.5, 1) + h.median(1)[0]).pow(2).sum() + p["k"].sum()


@loss
def gated_by_rank(p, x):
    h = x @ p["w"]
    top = h.topk(2, dim=1)[0]
    return (top.softmax(1) * top).sum() + p["k"].sum()


@loss
def means_and_spreads(p, x):
    spread, mean = torch.std_mean(x @ p["w"], dim=1)
    return (mean / (spread + 1)).sum() + p["k"].sum()


@loss
def without_nan(p, x):
    h = (x @ p["w"]).nanmean(1)
    low, high = (x @ p["w"]).aminmax(dim=1)
    return (h * (high - low)).sum() + p["k"].sum()


@loss
def spectrum(p, x):
    return torch.view_as_real(torch.fft.rfft(x @ p["w"], dim=1)).pow(2).sum() + p["k"].sum()


@loss
def differences(p, x):
    return torch.diff(x @ p["w"], dim=1).abs().sum() + p["k"].sum()


@loss
def windows(p, x):
    return (x @ p["w"]).unfold(1, 2, 1).mean(-1).pow(2).sum() + p["k"].sum()


@loss
def stacked(p, x):
    h = x @ p["w"]
    return torch.hstack([h, h.sin()]).pow(2).sum() + p["k"].sum()


@loss
def chain_of_labels(p, x):
    h = x @ p["w"]
    alpha = h[:, 0]
    for t in range(1, 4):
        alpha = torch.logsumexp(alpha.unsqueeze(-1) + h[:, t].unsqueeze(1), 1)
    return torch.logsumexp(alpha, -1).sum() + p["k"].sum()


@loss
def buckets(p, x):
    at = torch.bucketize(x, torch.linspace(-1, 1, 3, dtype=D))
    return (F.one_hot(at, 4).to(D).sum(1) @ (p["w"] @ p["w"].T)[:4]).pow(2).sum() + p["k"].sum()


def counted(f: Loss) -> Callable[[Any, Tensor], tuple[Tensor, Tensor]]:
    return lambda p, x: (f(p, x), torch.tensor(4))


def compiled(f: Callable[[Any, Tensor], tuple[Tensor, Tensor]], of: str) -> Any:
    mesh, layout = LAYOUTS[of]
    return ff.compile(ff.value_and_grad(f), template=TEMPLATE, mesh=mesh, layout=layout, batch=BATCH)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_plain_autograd(name: str):
    f = counted(LOSSES[name])
    g = torch.Generator().manual_seed(2)
    params = {k: torch.randn(q.shape, generator=g, dtype=D) for k, q in TEMPLATE.items()}
    own = {k: v.clone().requires_grad_(True) for k, v in params.items()}
    total, count = f(own, BATCH)
    (total / count).backward()
    for of in LAYOUTS:
        if (name, of) in REFUSED:
            with pytest.raises(ff.FeatherError, match=r"test_people\.py"):
                compiled(f, of)
            continue
        out, grads = compiled(f, of).simulate(params, BATCH)
        torch.testing.assert_close(out["loss"].detach(), (total / count).detach(), rtol=1e-10, atol=0)
        for k, v in own.items():
            torch.testing.assert_close(grads[k], v.grad, rtol=1e-9, atol=1e-10, msg=f"{of}: {k}")


def test_running_statistics_are_refused():
    def f(p, x):
        h = F.batch_norm(x, torch.zeros(4, dtype=D), torch.ones(4, dtype=D), training=True)
        return (h @ p["w"]).sum(), torch.tensor(4)

    with pytest.raises(ff.FeatherError, match="pass None for both") as e:
        compiled(f, "fsdp")
    assert "test_people.py" in str(e.value)
