"""GPT-2 against the reference implementation, and the properties of its template."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fx_feather.errors import ShapeError
from fx_feather.models import gpt2
from tests.models.reference import check, packed_equals_alone


@pytest.mark.parametrize("inner", [None, 24])
def test_equals_the_reference(inner, tmp_path):
    config = GPT2Config(
        vocab_size=19, n_positions=32, n_embd=16, n_layer=2, n_head=4, n_inner=inner,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model, params = check(GPT2LMHeadModel, config, tmp_path, 19)
    assert params["layers"][0]["mlp"]["up"].shape == (16, inner or 64)
    packed_equals_alone(model, params, 19)


def test_biases_start_at_zero_and_norms_at_one():
    cfg = gpt2.GPT2Config(vocab=16, context=8, layers=1, embed=8, heads=2)
    layer = gpt2.template(cfg)["layers"][0]
    assert repr(layer["attention"]["q_bias"].init) == "zeros()" and layer["attention"]["q_bias"].shape == (2, 4)
    assert repr(layer["mlp_norm"]["weight"].init) == "ones()"
    assert layer["attention"]["k"].dims == "embed heads head_dim"


def test_all_faults_of_a_config_are_listed_at_once():
    with pytest.raises(ShapeError, match=r"^3 problems:") as error:
        gpt2.GPT2Config(vocab=0, embed=10, heads=4, dtype=torch.int32)
    for word in ("GPT2Config(vocab)", "10 % 4 = 2", "torch.int32 is not a floating dtype"):
        assert word in str(error.value)
