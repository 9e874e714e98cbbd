"""What a batch lacks is named, whatever the model."""

from typing import Any

import pytest
import torch

from fx_feather.errors import BatchError
from fx_feather.models import deepseek_v3, gpt2, llama, mixtral

SIZES: dict[str, Any] = {"vocab": 8, "layers": 1, "embed": 8, "heads": 2}
LOSSES = {
    "llama": llama.loss(llama.LlamaConfig(**SIZES, kv_heads=1, mlp=8)),
    "gpt2": gpt2.loss(gpt2.GPT2Config(**SIZES, context=8)),
    "mixtral": mixtral.loss(mixtral.MixtralConfig(**SIZES, kv_heads=1, expert_mlp=8, experts=2, top_k=1)),
    "deepseek v3": deepseek_v3.loss(
        deepseek_v3.DeepSeekV3Config(
            **SIZES, dense_layers=1, kv_rank=6, plain_dim=4, rope_dim=2, value_dim=4, mlp=12, expert_mlp=6, experts=4,
            top_k=2, q_rank=None, shared_experts=1,
        )
    ),
}  # fmt: skip
TOKENS = torch.zeros(1, 4, dtype=torch.int64)
BATCHES = [
    ({"tokens": TOKENS, "labels": TOKENS}, ["a batch of labels, tokens", "positions, targets are missing"]),
    ({"tokens": TOKENS, "targets": TOKENS}, ["positions is missing", "torch.arange(seq)"]),
    (TOKENS, ["got:     Tensor", "tokens, positions, targets are missing"]),
]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("batch", "words"), BATCHES, ids=["two", "one", "no dict"])
def test_all_that_a_batch_lacks_is_named_at_once(name: str, batch: Any, words: list[str]) -> None:
    with pytest.raises(BatchError) as error:
        LOSSES[name]({}, batch)
    for word in [*words, "got:", "problem:", "rule:", "fix:"]:
        assert word in str(error.value)
