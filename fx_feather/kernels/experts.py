"""Experts on sorted tokens: each token is computed by the experts chosen for it and by no other."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .grouped import grouped_matmul


def experts(x: Tensor, index: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of the SwiGLU experts chosen for each token.

    Every choice is a row; rows are sorted by expert, so that each expert sees its own side by side and three grouped
    matmuls compute all of them. All sizes are known beforehand, however the tokens are spread: nothing is dropped.

    Args:
        x: `[..., embed]`.
        index: int`[..., k]`, the experts chosen for each token. Choices outside of `0 .. expert - 1` count for nothing.
        weights: `[..., k]`.
        gate, up: `[expert, embed, expert_mlp]`.
        down: `[expert, expert_mlp, embed]`.

    Returns:
        like `x`.

    Source: Gale et al., MegaBlocks, 2022, section 4 (without the padding of blocks).

    >>> one = torch.ones(2, 1, 1)
    >>> experts(torch.tensor([[1.0]]), torch.tensor([[1, 0]]), torch.tensor([[0.25, 0.5]]), one, one, one)
    tensor([[0.5483]])
    """
    n, k = gate.shape[0], index.shape[-1]
    flat = index.flatten()
    # What belongs to no expert here comes last, after the last group.
    flat = torch.where((flat >= 0) & (flat < n), flat, n)
    order = torch.argsort(flat, stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(n, device=flat.device), right=True)
    rows = x.reshape(-1, x.shape[-1]).index_select(0, order // k)
    hidden = F.silu(grouped_matmul(rows, gate, ends)) * grouped_matmul(rows, up, ends)
    # Rows go back to where they came from, so that no two are added to one place in an order that may change.
    back = grouped_matmul(hidden, down, ends).index_select(0, torch.argsort(order))
    chosen = back.view(*index.shape, down.shape[-1])
    return (chosen * weights.unsqueeze(-1)).sum(-2)


_library = torch.library.Library("fx_feather", "FRAGMENT")
_library.define("experts(Tensor x, Tensor index, Tensor weights, Tensor gate, Tensor up, Tensor down) -> Tensor")
# Composite: differentiable by its parts, and still one node of a global program, whose rule says how it is split.
_library.impl("experts", experts, "CompositeImplicitAutograd")
