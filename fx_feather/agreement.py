"""Agreement: what all ranks should have in common is compared by bytes of fixed size, and what differs is named."""

import dataclasses
import hashlib
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from .errors import RankError, fail
from .mesh import Mesh
from .spec import Type

#: Gives all ranks what each of them brought, in their order: bytes of one length on all of them.
Everyone = Callable[[bytes], list[bytes]]

#: Bytes of a leaf that are hashed at most, in pieces that are spread over it.
_WHOLE, _PIECES = 16 << 20, 16
#: Of a line of a program, and lines of a message.
_LINE, _SHOWN = 160, 8


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value that a rank holds, with the type that says which ranks hold the same part of it."""

    path: str
    value: torch.Tensor
    type: Type


def digest(x: torch.Tensor) -> int:
    """A checksum of the bytes of a tensor; of a large one, of some pieces that are spread over it.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(torch.tensor([0.0, -0.0]))
    (True, False)
    """
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) > _WHOLE:
        size, step = _WHOLE // _PIECES, len(flat) // _PIECES
        flat = torch.cat([flat[i * step : i * step + size] for i in range(_PIECES)])
    return zlib.crc32(flat.cpu().numpy().data)


def check_programs(text: str, mesh: Mesh, everyone: Everyone) -> None:
    """Raises RankError if ranks are about to run different programs; it names them, and the first line that differs."""
    prints = everyone(hashlib.sha256(text.encode()).digest())
    kinds = Counter(prints)
    if len(kinds) == 1:
        return
    lines = text.splitlines()
    equal, unequal = 0, max(struct.unpack("=I", n)[0] for n in everyone(struct.pack("=I", len(lines))))
    while unequal - equal > 1:
        middle = (equal + unequal) // 2
        same = len(set(everyone(hashlib.sha256("\n".join(lines[:middle]).encode()).digest()))) == 1
        equal, unequal = (middle, unequal) if same else (equal, middle)
    own = lines[equal] if equal < len(lines) else "(it ends here)"
    found = [x.decode(errors="replace").strip() for x in everyone(own.encode()[:_LINE].ljust(_LINE))]
    usual = kinds.most_common(1)[0][0]
    odd = [r for r, x in enumerate(prints) if x != usual]
    first = prints.index(usual)
    shown = [first, *odd[:_SHOWN]] if len(prints) > _SHOWN else range(len(prints))
    alone = f"; {_ranks(odd)} {'has' if len(odd) == 1 else 'have'} another than {_ranks([first])}"
    fail(
        RankError,
        call=f"first run on {mesh!r}",
        got="\n".join(f"rank {r}: program {prints[r].hex()[:12]}" for r in shown),
        number=f"{len(kinds)} different programs{alone}; line {equal + 1} is the first that differs:\n"
        + "\n".join(f"rank {r}: {found[r]}" for r in sorted({first, *odd[:_SHOWN]})),
        rule="all ranks run one program: otherwise their collectives don't meet, and the run hangs",
        fix="compile with the same model, layout, mesh and batch shapes on every rank, and the same constants in it",
    )


def check_numbers(call: str, numbers: Mapping[str, int | None], ranks: Sequence[int], everyone: Everyone) -> None:
    """Raises RankError if numbers that ranks should have in common differ; `ranks` are those that are compared."""
    # A seed is any whole number: of one beyond 255 bits the low ones are compared.
    own = b"".join(b"-" + bytes(32) if n is None else b"+" + (n % (1 << 256)).to_bytes(32) for n in numbers.values())
    found = everyone(own)
    for i, name in enumerate(numbers):
        values = [_number(x[33 * i : 33 * i + 33]) for x in found]
        if len(set(values)) > 1:
            usual = Counter(values).most_common(1)[0][0]
            first = values.index(usual)
            odd = [i for i, v in enumerate(values) if v != usual]
            fail(
                RankError,
                call=call,
                got="\n".join(f"{name} {values[i]} on rank {ranks[i]}" for i in [first, *odd[:_SHOWN]]),
                number=f"{_ranks([ranks[i] for i in odd])} differ{'s' if len(odd) == 1 else ''} in the {name}",
                rule="all ranks take the same steps from the same start: otherwise their parts are of different runs",
                fix=_FIXES[name],
            )


def _number(x: bytes) -> int | None:
    return None if x[:1] == b"-" else int.from_bytes(x[1:], signed=True)


_FIXES = {
    "step": "take every step on all ranks, from states of the same step: none may skip one, or load another file",
    "seed": "state = step.init(seed=0), with one seed on all ranks",
}


def check_leaves(call: str, leaves: Sequence[Leaf], mesh: Mesh, everyone: Everyone) -> list[str]:
    """Raises RankError where ranks that should hold the same part of a value hold other bits.

    Returns:
        The paths of leaves that are not finite on some rank, the same on all.
    """
    digests = [digest(x.value) if set(mesh.axes) - x.type.sharded else 0 for x in leaves]
    bad = [not bool(x.value.isfinite().all()) for x in leaves]
    form = f"={len(leaves)}I{len(leaves)}?"
    found = [struct.unpack(form, x) for x in everyone(struct.pack(form, *digests, *bad))]
    n = len(leaves)
    lines, wrong = [], set()
    for i, x in enumerate(leaves):
        parts: dict[tuple[int, ...], list[int]] = {}
        for r in range(len(found)):
            at = mesh.coords(r)
            parts.setdefault(tuple(at[a] for a in mesh.axes if a in x.type.sharded), []).append(r)
        for ranks in parts.values():
            kinds = Counter(found[r][i] for r in ranks)
            usual = kinds.most_common(1)[0][0]
            odd = [r for r in ranks if found[r][i] != usual]
            if odd:
                first = next(r for r in ranks if found[r][i] == usual)
                lines.append(f"{x.path}, {x.type}: {_ranks(odd)} not as rank {first}")
                wrong.add(x.path)
    if lines:
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        batch = all(p.startswith("batch") for p in wrong)
        fail(
            RankError,
            call=f"{call} on {mesh!r}",
            got="\n".join([*lines[:_SHOWN], *more]),
            number=f"{len(wrong)} of {n} leaves differ between ranks that should hold the same",
            rule="what a layout doesn't split over an axis is the same along it: otherwise replicas drift apart",
            fix="the same whole batch on all ranks for step.shard(batch), or for step.from_local(rows) the same rows "
            "on ranks that differ on other axes only"
            if batch
            else "parameters and state from step.init, step.shard_state or ff.hf.load, with the same seed or files on "
            "all ranks; what changes them must be the same on all",
        )
    return [x.path for i, x in enumerate(leaves) if any(f[n + i] for f in found)]


def token(*numbers: int | None) -> float:
    """A number of 20 bits that numbers of ranks which go together share; sums of it and its square are exact."""
    return float(zlib.crc32(repr(numbers).encode()) & 0xFFFFF)


def is_shared(ranks: int, total: float, squares: float) -> bool:
    """Whether tokens are all equal, by the sums of them and of their squares.

    >>> [is_shared(3, sum(x), sum(y * y for y in x)) for x in ([2, 2, 2], [1, 2, 3])]
    [True, False]
    """
    return ranks * int(squares) == int(total) ** 2


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
