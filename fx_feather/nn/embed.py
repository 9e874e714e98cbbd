"""The embedding of tokens, and its transpose that reads logits off the last hidden state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_feather.param import Param, normal


def template(vocab: int, embed: int, *, std: float = 0.02, dtype: torch.dtype = torch.float32) -> Param:
    """A table with one row per token of the vocabulary, for `embed` and for `unembed`.

    >>> template(256, 16).shape
    (256, 16)
    """
    return Param("vocab embed", (vocab, embed), init=normal(std), dtype=dtype)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Looks up the row of each token.

    Args:
        table: `[vocab, embed]`.
        tokens: int`[batch, seq]`, in `0 .. vocab - 1`.

    Returns:
        `[batch, seq, embed]`.

    >>> embed(torch.eye(3), torch.tensor([[2, 0]]))
    tensor([[[0., 0., 1.],
             [1., 0., 0.]]])
    """
    return F.embedding(tokens, table)


def unembed(table: Tensor, h: Tensor) -> Tensor:
    """The product of each hidden state with every row of the table.

    A tied model passes the table of `embed` (Press and Wolf, Using the Output Embedding to Improve Language
    Models, 2017); an untied one has a second table of the same shape, so that both run one operator.

    Args:
        table: `[vocab, embed]`.
        h: `[batch, seq, embed]`.

    Returns:
        logits `[batch, seq, vocab]`.

    >>> unembed(torch.eye(3), torch.tensor([[[0.0, 5.0, 0.0]]]))
    tensor([[[0., 5., 0.]]])
    """
    return F.linear(h, table)
