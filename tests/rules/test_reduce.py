"""Reductions of pending sums: what a reduction rounds is summed over the ranks first."""

import pytest
import torch

import fx_feather as ff


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, None])
@pytest.mark.parametrize("dim", [None, 1])
def test_a_pending_sum_is_complete_before_it_is_rounded(dtype: torch.dtype | None, dim: int | None) -> None:
    def f(params, batch):
        product = batch @ params["w"]  # a pending sum over tp
        return product.sum(dtype=dtype) if dim is None else product.sum(dim, dtype=dtype)

    template = {"w": ff.Param("embed mlp", (4, 6), ff.normal(30.0), dtype=torch.float64)}
    batch = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layout = ff.Layout(compute={"embed": "tp"})
    g = ff.compile(f, template=template, mesh=ff.Mesh(tp=2), layout=layout, batch=batch, batch_dims="batch embed")
    params = ff.init(template)
    torch.testing.assert_close(g.simulate(params, batch), f(params, batch))
