"""AdamW's kernel beside its formula in operators of torch."""

import pytest
import torch

from fx_feather.kernels import adamw
from fx_feather.optim import leaf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 1e-6, 1e4, 0.0])
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_step_is_that_of_the_formula(dtype: torch.dtype, factor: float, size: int) -> None:
    g = torch.Generator().manual_seed(0)
    param, grad, mu, nu = torch.randn(4, size, generator=g, dtype=torch.float64).to(dtype).unbind()
    nu, scale, lr, step = nu.abs(), torch.tensor(factor, dtype=dtype), torch.tensor(0.01), torch.tensor(3.0)
    given = [x.clone() for x in (param, grad, scale, mu, nu, lr, step)]
    got = adamw(*given, b1=0.9, b2=0.95, eps=1e-8, decay=0.1)
    for x, before in zip(given, (param, grad, scale, mu, nu, lr, step), strict=True):
        assert torch.equal(x, before), "nothing that comes in is written to"
    wide = [x.to(torch.float64) for x in (grad * scale, mu, nu, param, lr)]
    update, mu, nu = leaf.adamw_leaf(*wide, *leaf.corrections(step, 0.9, 0.95), 0.9, 0.95, 1e-8, 0.1)
    close = {"rtol": 2e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    for a, b in zip(got, (wide[3] + update, mu, nu, wide[0]), strict=True):
        torch.testing.assert_close(a.to(torch.float64), b, **close)
