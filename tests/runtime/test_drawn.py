"""The law of programs on real ranks: what is drawn runs as two processes, and is what torch.autograd makes of it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from tests.laws.drawn import programs
from tests.laws.test_programs import COMPARED, KINDS, REMAT
from tests.runtime.launch import launch

#: Programs, and with `--deep`.
SOME, DEEP = 10, 300


def cases(n: int) -> list[dict[str, Any]]:
    """Drawn here, once, so that both ranks read the same."""
    drawn: list[dict[str, Any]] = []

    @seed(2)
    @settings(max_examples=n, phases=[Phase.generate])
    @given(programs(), st.sampled_from(list(KINDS)), st.sampled_from([1, 1, 2]), st.sampled_from(REMAT))
    def draw(program: Any, kind: str, parts: int, remat: str) -> None:
        drawn.append({"source": program.source, "kind": kind, "parts": parts, "remat": remat})

    draw()
    return drawn


def test_a_program_on_two_ranks_is_itself(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    deep = request.config.getoption("--deep")
    some = cases(DEEP if deep else SOME)
    (tmp_path / "cases.json").write_text(json.dumps(some))
    ended = launch("drawn", 2, tmp_path, limit_s=3600 if deep else 280)
    for rank, e in enumerate(ended):
        assert e.code == 0, f"rank {rank} ended with {e.code}:\n{e.text}"
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        found = report["found"]
        assert report["ranks"] == 2
        wrong = [
            f"{case['source']}{case}\n{what}"
            for case, what in zip(some, found, strict=True)
            if what not in ("equal", "refused")
        ]
        assert not wrong, f"rank {rank}:\n" + "\n\n".join(wrong)
        assert Counter(found)["equal"] >= COMPARED * len(some), Counter(found)
