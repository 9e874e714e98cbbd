"""Ordering: calls in the order in which outputs need them, so that each value lives as briefly as it can.

Keeps results bit for bit: the same calls run on the same values.
"""

from collections.abc import Sequence

from ..unit import Call


def by_output(calls: Sequence[Sequence[Call]], *outputs: Sequence[int], done: Sequence[int] = ()) -> list[int]:
    """Numbers of the calls that make the outputs, depth first, output by output.

    An update of one leaf is then finished before that of the next begins: the old values are freed at once, and a
    step needs no second copy of parameters and optimizer state.

    Args:
        calls: the rows of each call.
        outputs: values that are wanted, in order of priority.
        done: calls that were made before.
    """
    maker = {o: k for k, rows in enumerate(calls) for row in rows for o in row.outs}
    seen, order = set(done), []
    for wanted in (v for group in outputs for v in group):
        stack = [(maker[wanted], False)] if wanted in maker else []
        while stack:
            k, ready = stack.pop()
            if ready:
                order.append(k)
            elif k not in seen:
                seen.add(k)
                stack.append((k, True))
                stack.extend((maker[a], False) for row in reversed(calls[k]) for a in reversed(row.args) if a in maker)
    return order
