"""Keys that a config lacks: they mean what `transformers` takes for them, family by family."""

import pytest
from transformers import AutoConfig

from fx_feather.errors import FeatherError
from fx_feather.hf.families import FAMILIES
from fx_feather.hf.settings import Settings

# DeepSeek-V2 leaves it open how many experts a token has.
OPEN = {"deepseek_v2": {"num_experts_per_tok": 6}}


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_the_familys_own_config(kind):
    theirs = AutoConfig.for_model(kind)
    wrong = {
        key: (value, getattr(theirs, key))
        for key, value in FAMILIES[kind].defaults.items()
        # There a missing size of a head is worked out from others.
        if hasattr(theirs, key) and not (key == "head_dim" and value is None) and getattr(theirs, key) != value
    }
    assert not wrong


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_config_without_keys_is_the_familys_own(kind):
    """All that is read from a config without a key is read from one with every key that `transformers` writes."""
    given = OPEN.get(kind, {})
    family, theirs = FAMILIES[kind], AutoConfig.for_model(kind, **given)
    bare = family.config(Settings({"model_type": kind, **given}, "config.json", family.defaults))
    whole = family.config(Settings(theirs.to_dict(), "config.json", family.defaults))
    alike = {k: v for k, v in vars(whole).items() if k != "head_dim"}
    assert {k: v for k, v in vars(bare).items() if k != "head_dim"} == alike
    assert getattr(bare, "head_size", None) == getattr(whole, "head_size", None)


def test_a_key_without_a_default_is_missing():
    family = FAMILIES["deepseek_v2"]
    with pytest.raises(FeatherError, match="'num_experts_per_tok' is missing"):
        family.config(Settings({"model_type": "deepseek_v2"}, "config.json", family.defaults))
