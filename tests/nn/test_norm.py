"""Both norms against their equations, and their precision in bf16."""

import pytest
import torch

from fx_feather.nn import norm
from fx_feather.param import init


def rms(x, w, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def layer(x, w, b, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * w + b


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_norms_equal_their_equations(eps):
    x, w, b = torch.randn(2, 3, 8).double(), torch.randn(8).double(), torch.randn(8).double()
    torch.testing.assert_close(norm.rms_norm(w, x, eps), rms(x, w, eps), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        norm.layer_norm({"weight": w, "bias": b}, x, eps), layer(x, w, b, eps), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_rounded_once(dtype):
    x, w, b = torch.randn(4, 64).to(dtype), torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    wide = rms(x.double(), w.double(), 1e-5)
    out = norm.rms_norm(w, x)
    assert out.dtype == dtype
    half_an_ulp = torch.finfo(dtype).eps / 2
    assert ((out.double() - wide).abs() <= wide.abs() * half_an_ulp * 1.01 + 1e-6).all()
    wide = layer(x.double(), w.double(), b.double(), 1e-5)
    out = norm.layer_norm({"weight": w, "bias": b}, x)
    assert out.dtype == dtype
    assert ((out.double() - wide).abs() <= wide.abs() * half_an_ulp * 1.01 + 1e-5).all()


def test_norms_start_as_the_plain_norm():
    x = torch.randn(3, 8).double()
    torch.testing.assert_close(norm.rms_norm(init(norm.rms_template(8, dtype=torch.float64)), x), rms(x, 1.0, 1e-5))
    params = init(norm.layer_template(8, dtype=torch.float64))
    torch.testing.assert_close(norm.layer_norm(params, x), layer(x, 1.0, 0.0, 1e-5))


def test_templates_name_the_dim_they_norm():
    assert norm.rms_template(8, "head_dim").dims == "head_dim"
    assert {p.dims for p in norm.layer_template(8, "mlp").values()} == {"mlp"}
