"""Ordering: calls in the order in which outputs need them, so that each value lives as briefly as it can."""

from collections.abc import Sequence

from ..unit import GlobalProgram


def by_output(program: GlobalProgram, *outputs: Sequence[int], done: Sequence[int] = ()) -> list[int]:
    """Numbers of the calls that make the outputs, depth first, output by output.

    An update of one leaf is then finished before that of the next begins: the old values are freed at once, and a
    step needs no second copy of parameters and optimizer state.

    Args:
        program: whose calls to order.
        outputs: values that are wanted, in order of priority.
        done: calls that were made before.
    """
    maker = {o: k for k, call in enumerate(program.calls) for o in call.outs}
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
                stack.extend((maker[a], False) for a in reversed(program.calls[k].args) if a in maker)
    return order
