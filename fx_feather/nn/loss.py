"""Cross-entropy as a sum and a count, so that any split of a batch has the same gradient."""

import torch
from torch import Tensor

from .norm import NARROW


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """The negative log-likelihood summed over valid targets, and their number.

    The mean is left to whoever sums over the whole batch: a mean of means weighs tokens unequally.
    Batch and sequence are not flattened into one dim, since each may be split on its own.

    Args:
        logits: `[..., vocab]`. bf16 and fp16 are widened to fp32 first.
        targets: int`[...]`, in `0 .. vocab - 1`, or `ignore_index` where there is nothing to predict.
        ignore_index: marks the targets that count neither in the sum nor in the count.

    Returns:
        the sum in nats, a scalar in the dtype of the logits (fp32 or wider), and the count, an int64 scalar.

    >>> cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]))
    (tensor(1.3863), tensor(1))
    """
    if logits.dtype in NARROW:
        logits = logits.float()
    valid = targets != ignore_index
    # A row that the gather can read, for targets that mark no row.
    rows = torch.where(valid, targets, 0)
    nll = torch.ops.fx_feather.token_nll(logits, rows)
    return torch.where(valid, nll, 0.0).sum(), valid.sum()
