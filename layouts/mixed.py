"""Mixed precision: parameters rest in their own dtype, compute is narrow, gradients are reduced wide.

Split, replicated: nothing by itself; it is composed with the layouts that split.
Forward: parameters are cast where they rest, so an all-gather sends the narrow dtype. Activations are narrow too, and
so is what tensor parallel sends.
Backward: gradients of parameters are cast before they are reduced, over every axis, and accumulate in the wide dtype.
Update: in the dtype of the parameters at rest.

Bytes, with bf16 compute and fp32 reduction: all-gathers at use and activations cost half of those in fp32, reductions
of gradients as much.

Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.1.
"""

import torch

from fx_feather import Layout, Precision


def mixed(compute: torch.dtype = torch.bfloat16, reduce: torch.dtype = torch.float32) -> Layout:
    """Computes and gathers in `compute`, reduces and accumulates gradients in `reduce`.

    >>> mixed().precision
    Precision(compute=torch.bfloat16, reduce=torch.float32)
    """
    return Layout(precision=Precision(compute=compute, reduce=reduce))
