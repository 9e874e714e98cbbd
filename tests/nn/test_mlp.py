"""SwiGLU against its equation."""

import torch

from fx_feather.nn import mlp
from fx_feather.param import init


def test_swiglu_equals_its_equation():
    params = init(mlp.template(6, 10, dtype=torch.float64))
    h = torch.randn(2, 3, 6).double()
    gate, up = h @ params["gate"], h @ params["up"]
    expected = (gate / (1 + (-gate).exp()) * up) @ params["down"]
    torch.testing.assert_close(mlp.swiglu(params, h), expected, rtol=1e-12, atol=1e-12)


def test_template_has_three_weights_with_their_dims():
    template = mlp.template(6, 10)
    assert {n: (p.dims, tuple(p.shape)) for n, p in template.items()} == {
        "gate": ("embed mlp", (6, 10)),
        "up": ("embed mlp", (6, 10)),
        "down": ("mlp embed", (10, 6)),
    }
