"""What a peer sends: a mode that sees every collective of torch.distributed, also those that C++ and DTensor start."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Counts collectives, and the bytes that this rank sends in each if it runs as a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, _, name = str(func).partition(".")
        if space in ("c10d", "_c10d_functional"):
            name = name.partition(".")[0].strip("_")
            share = self._share(name, args, out)
            if share:
                self.calls[name] = self.calls.get(name, 0) + 1
                self.sent_bytes += math.ceil(share)
        return out

    def _share(self, name: str, args: Any, out: Any) -> float:
        def size(x: Any) -> int:
            return sum(t.numel() * t.element_size() for t in tree_leaves(x) if isinstance(t, torch.Tensor))

        n = self._ranks(args)
        if "reduce_scatter" in name:
            # The in-place form takes the output first.
            return max(size(args[0]), size(args[1])) * (n - 1) / n
        if "allreduce" in name or "all_reduce" in name:
            return 2 * size(args[0]) * (n - 1) / n
        if "allgather" in name or "all_gather" in name:
            return max(size(args[0]), size(out)) * (n - 1) / n
        if "alltoall" in name or "all_to_all" in name:
            return size(args[0]) * (n - 1) / n
        return size(args[0]) if "broadcast" in name else 0

    @staticmethod
    def _ranks(args: Any) -> int:
        for a in args:
            if isinstance(a, str) and a not in ("sum", "avg", "max", "min"):
                return dist.get_world_size(torch._C._distributed_c10d._resolve_process_group(a))
            if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()):
                return dist.ProcessGroup.unbox(a).size()
        return dist.get_world_size()
