"""Explaining: a program as text by block, with what each part computes, what it communicates, and how many bytes."""

from collections import Counter

from .program import CollectiveNode, Func, Program, Section

_ROLES = {
    "init": "optimizer state from parameters, once",
    "first": "forward and backward of the first microbatch",
    "following": "forward and backward of each further microbatch, added up",
    "finish": "reduction of what the microbatches left pending",
    "check": "loss and gradient norm",
    "update": "clipping, optimizer, new parameters",
    "mean": "loss and gradients of sum / count",
    "main": "the function",
}


def explain(program: Program) -> str:
    """The program by section and function, in order: calls, operators of a call, collectives with their bytes.

    Bytes are those that one rank sends in a ring, for one run of the section. A call that communicates is started where
    it stands, and awaited at the first use of a result; `beside` names what is computed meanwhile. A function whose
    collectives wait for each other overlaps inside: what a collective doesn't need comes after its start.
    """
    lines = [f"program for {program.mesh!r}, {program.mesh.size} rank{'s' if program.mesh.size > 1 else ''}"]
    for section in program.sections.values():
        lines += ["", *_section(section)]
    return "\n".join(lines)


def _section(section: Section) -> list[str]:
    collectives = section.collectives()
    head = f"{section.name}: {_ROLES.get(section.name, 'a section')}"
    lines = [f"{head}; {len(collectives)} collectives, {_size(sum(c.sent_bytes for c in collectives))} sent a rank"]
    calls: list[tuple[Func, int]] = []
    for i in section.instrs:
        if calls and calls[-1][0] is i.func:
            calls[-1] = (i.func, calls[-1][1] + len(i.ins))
        else:
            calls.append((i.func, len(i.ins)))
    shown, beside = _folded(calls), _beside(section)
    width = max((len(f.name) for (f, _), _ in shown), default=0)
    for (func, rows), times in shown:
        count = rows * times
        operators = sum(n.op == "call_function" for n in func.graph.nodes)
        inside = list(func.collectives())
        text = f"  {func.name:<{width}}  {count:>4} x {operators:>4} operators"
        text += f"  {_listed(inside)}" if inside else ""
        lines.append(text + (f", beside {', '.join(beside[func])}" if beside.get(func) else ""))
    return lines


def _beside(section: Section) -> dict[Func, list[str]]:
    """For each function that is awaited later: what computes between its start and the first use of its results."""
    used: dict[int, int] = {}
    for k, i in enumerate(section.instrs):
        for v in (v for row in i.ins for v in row):
            used.setdefault(v, k)
    end = len(section.instrs)
    waits = {f: f.can_wait() for f in dict.fromkeys(i.func for i in section.instrs)}
    found: dict[Func, dict[str, None]] = {}
    for k, i in enumerate(section.instrs):
        if waits[i.func]:
            first = min((used.get(v, end) for outs in i.outs for v in outs), default=end)
            between = [j.func for j in section.instrs[k + 1 : first]]
            found.setdefault(i.func, {}).update(dict.fromkeys(f.name for f in between if f.computes))
    return {f: list(names) for f, names in found.items()}


def _folded(calls: list[tuple[Func, int]]) -> list[tuple[tuple[Func, int], int]]:
    """Calls with how often each comes, in order of first appearance."""
    counts = Counter(calls)
    return [(c, counts[c]) for c in dict.fromkeys(calls)]


def _listed(collectives: list[CollectiveNode]) -> str:
    counts = Counter(collectives)
    return ", ".join(
        (f"{n} x " if n > 1 else "")
        + f"{c.name}@{','.join(c.axes)} of {_size(c.operand_bytes)} {str(c.dtype).removeprefix('torch.')}"
        for c, n in counts.items()
    )


def _size(n: int) -> str:
    """Bytes, in units of 1024 above a thousand.

    >>> _size(512), _size(1536), _size(3 << 20)
    ('512 B', '1.5 KiB', '3.0 MiB')
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} B"
