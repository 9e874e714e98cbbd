"""A loss that no parameter reaches is an error: it would train, and move nothing."""

from typing import Any

import pytest
import torch

import fx_feather as ff
import layouts
from fx_feather import agreement
from fx_feather.errors import RankError

TEMPLATE = {"w": ff.Param("embed mlp", (4, 6))}


def compiled(loss: Any, **options: Any) -> Any:
    return ff.compile_step(
        loss, ff.sgd(lr=0.1), template=TEMPLATE, mesh=ff.Mesh(dp=2), layout=layouts.ddp("dp"), batch=torch.ones(4, 4),
        batch_dims="batch embed", **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    "sum_of",
    [
        lambda p, x: (x @ p["w"]).detach().sum(),
        lambda p, x: (x @ p["w"]).argmax(1).sum().float(),
        lambda p, x: x.sum(),
        lambda p, x: ((x @ p["w"]) > 0).float().sum(),
    ],
)
def test_a_sum_that_no_parameter_reaches(sum_of: Any) -> None:
    with pytest.raises(ff.FeatherError, match="every gradient would be 0") as e:
        compiled(lambda p, x: (sum_of(p, x), torch.tensor(4)))
    assert "test_reach.py" in str(e.value)


def test_a_part_of_the_parameters_is_enough() -> None:
    compiled(lambda p, x: ((x @ p["w"]).detach().sum() + p["w"].sum(), torch.tensor(4)))


def test_a_device_is_named_or_given() -> None:
    def loss(p: Any, x: Any) -> Any:
        return (x @ p["w"]).sum(), torch.tensor(4)

    assert compiled(loss, device=torch.device("cpu")).device == compiled(loss, device="cpu").device == "cpu"
    with pytest.raises(ff.FeatherError, match="cuda:7"):
        compiled(loss, device=torch.device("cuda:7"))


@pytest.mark.parametrize("pair", [(0, 1 << 62), (-1, 1 << 62), (5, 5 + (1 << 64)), (0, None), (-(1 << 63), 1 << 63)])
def test_any_two_seeds_differ(pair: tuple[Any, Any]) -> None:
    sent: list[bytes] = []

    def first(data: bytes) -> list[bytes]:
        sent.append(data)
        return [data]

    agreement.check_numbers("step(state)", {"seed": pair[0]}, [0], first)
    with pytest.raises(RankError, match=f"seed {pair[1]} on rank 1"):
        agreement.check_numbers("step(state)", {"seed": pair[1]}, [0, 1], lambda data: [sent[0], data])
    agreement.check_numbers("step(state)", {"seed": pair[0]}, [0, 1], lambda data: [sent[0], data])
