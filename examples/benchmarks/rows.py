"""The rows of the benchmark: a layout, the peer it stands beside, and the mesh both use on so many ranks."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        peer: what a PyTorch user would pick, in words.
        axes: sizes of the mesh axes on so many ranks, outermost first; empty where the row has no meaning.
        layouts: functions of `layouts` by the axes they take, in order; together they are the layout.
        options: of `compile_step`, where they are not the defaults.
    """

    peer: str
    axes: Callable[[int], dict[str, int] | None]
    layouts: tuple[tuple[str, tuple[str, ...]], ...]
    options: tuple[tuple[str, str], ...] = ()


def _alone(ranks: int) -> dict[str, int] | None:
    return {} if ranks == 1 else None


def _flat(axis: str) -> Callable[[int], dict[str, int] | None]:
    return lambda ranks: {axis: ranks} if ranks > 1 else None


def _halved(outer: str, inner: str, least: int) -> Callable[[int], dict[str, int] | None]:
    return lambda ranks: {outer: ranks // 2, inner: 2} if ranks >= least and ranks % 2 == 0 else None


ROWS = {
    "eager": Row("eager", _alone, ()),
    "compiled": Row("torch.compile", _alone, (), (("backend", "inductor"), ("remat", "selective"))),
    "ddp": Row("DistributedDataParallel", _flat("dp"), (("ddp", ("dp",)),)),
    "fsdp": Row("fully_shard (FSDP2)", _flat("dp"), (("fsdp", ("dp",)),)),
    "hsdp": Row("fully_shard (HSDP)", _halved("replica", "shard", 4), (("hsdp", ("replica", "shard")),)),
    "tp": Row("DTensor TP + SP", _flat("tp"), (("tp_sp", ("tp",)),)),
    "fsdp_tp": Row("FSDP2 x DTensor TP", _halved("dp", "tp", 2), (("fsdp", ("dp",)), ("tp_sp", ("tp",)))),
}
