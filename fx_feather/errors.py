"""The error types, and the builder of their five-part messages."""

from collections.abc import Sequence
from typing import NoReturn


class FeatherError(ValueError):
    """Any mistake that fx_feather found in what it was given."""


class MeshError(FeatherError):
    """A mesh or a mesh axis that does not exist or does not fit the world."""


class SpecError(FeatherError):
    """A spec that is not well formed, or does not fit its tensor."""


class LayoutError(FeatherError):
    """A layout that is not well formed, or does not fit its model and mesh."""


class ShapeError(FeatherError):
    """A tensor of the wrong shape, dtype or size."""


class BatchError(ShapeError):
    """A batch that lacks what a model reads, or that is not like the example batch a step was compiled for."""


class RuleError(FeatherError):
    """An operator that has no sharding rule, or a rule that is not well formed."""


class AmbiguousError(FeatherError):
    """An operator whose operands are split in ways that do not fit together."""


class TypeStateError(FeatherError):
    """A typed collective applied to a value in the wrong state."""


class OptimizerError(FeatherError):
    """An optimizer or schedule with impossible settings."""


class OptionError(FeatherError):
    """An option of `compile`, `compile_step` or a layout that does not exist, or that has an impossible value."""


class BackendError(FeatherError):
    """A backend, or a library behind one, that does not exist or is not there."""


class StateError(FeatherError):
    """A training state that was donated already, or that belongs to another step."""


class DataError(FeatherError):
    """A data file that is missing, empty or too short."""


class GenerateError(FeatherError):
    """Prompts, or a way of choosing tokens, that no text can be generated from."""


class NonFiniteError(FeatherError):
    """A loss or gradient that is NaN or infinite; the step was not applied."""


class RankError(FeatherError, RuntimeError):
    """Another rank died, hung, or runs a different program.

    Attributes:
        secondary: whether it tells of another rank's failure, which has a traceback of its own.
    """

    secondary = False


def message(*, call: str, got: str, number: str, rule: str, fix: str) -> str:
    """Builds a message in five parts, written for a tired person at 2 a.m.

    Args:
        call: which call, on which parameter or value.
        got: what it got, in the one notation, and the mesh.
        number: the one number (or name) that fails.
        rule: the rule, and its reason.
        fix: the exact call or edit that mends it.

    >>> print(message(call="Mesh(tp=0)", got="tp=0", number="0 is not at least 1",
    ...               rule="an axis has one rank or more", fix="Mesh(tp=1)"))
    Mesh(tp=0)
      got:     tp=0
      problem: 0 is not at least 1
      rule:    an axis has one rank or more
      fix:     Mesh(tp=1)
    """
    parts = [("got", got), ("problem", number), ("rule", rule), ("fix", fix)]
    body = [f"  {name + ':':<9}" + text.replace("\n", "\n" + " " * 11) for name, text in parts]
    return "\n".join([call, *body])


def fail(error: type[FeatherError], **parts: str) -> NoReturn:
    """Raises `error` with a five-part message; see `message`."""
    raise error(message(**parts))


def raise_all(error: type[FeatherError], messages: Sequence[str]) -> None:
    """Raises one `error` that lists every message; does nothing when there is none."""
    if not messages:
        return
    if len(messages) == 1:
        raise error(messages[0])
    raise error(f"{len(messages)} problems:\n" + "\n".join(f"{i}. {m}" for i, m in enumerate(messages, 1)))


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint naming the most similar known names, or all of them when none is similar."""
    import difflib

    close = difflib.get_close_matches(name, known, n=3)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "known: " + (", ".join(repr(k) for k in known) if known else "none")
