"""Hybrid sharded data parallel (HSDP): FSDP over one axis, DDP over another.

Split: the batch over both axes, replica major; parameters, gradients and optimizer state at rest over shard.
Replicated: all that rests, over replica; the parameters of a block over both while it computes.
Forward: an all-gather over shard of each block's parameters before its use.
Backward: the all-gather again where the gathered parameters were not kept, and a reduce-scatter over shard of the
gradients, in each microbatch; then an all-reduce over replica of the parts, once a step.

A parameter without an embed dim (a q/k-norm's scale) stays whole, and its gradient is all-reduced over both axes.

Bytes that a rank sends a step, with P the bytes of the parameters (each in the dtype that is sent), m microbatches,
s the ranks of shard and r those of replica: over shard as FSDP, m P (s-1)/s forward and as much backward, twice as much
where they are gathered again; over replica 2 (P/s) (r-1)/r. So shard wants the fast links.

Source: Zhao et al., PyTorch FSDP, 2023, section 3.2.2.
"""

from fx_feather import Layout

from .ddp import ddp
from .fsdp import fsdp


def hsdp(replica: str | tuple[str, ...] = "replica", shard: str | tuple[str, ...] = "shard") -> Layout:
    """The batch is split over both axes and, at rest, parameters, gradients and optimizer state over `shard`.

    >>> hsdp().compute, hsdp().store.params
    ({'batch': ('replica', 'shard')}, {'embed': ('shard',), 'latent': ('shard',)})
    """
    return ddp(replica) | fsdp(shard)
