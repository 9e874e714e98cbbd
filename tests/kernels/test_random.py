"""Draws by a key: known answers, parts of a whole, and statistics that would show a weak or a shared stream."""

import itertools
import math

import pytest
import torch

import fx_feather as ff
from fx_feather.kernels import random as kernel

N = 1 << 17


def whole(kind, args, shape, key=7, dtype=torch.float64, site=0):
    where = [list(shape), list(shape), site, kind, list(args), dtype, -1, 1]
    return torch.ops.fx_feather.draw(None, torch.tensor(key), None, [], [], *where)


def test_the_stream_is_splitmix64():
    # The first outputs for the seed 1234567, as the authors of its reference implementation in C give them.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    out = kernel.bits(torch.tensor(1234567), torch.tensor(kernel.signed(kernel.GOLDEN)), 5)
    assert [x % 2**64 for x in out.tolist()] == known


@pytest.mark.parametrize("key", [0, 5, -7, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("data", [0, 3, -9])
def test_keys_are_the_same_as_numbers_and_as_tensors(key, data):
    number, tensor = kernel.fold_in(key, data), kernel.fold_in(torch.tensor(key), torch.tensor(data))
    assert kernel.signed(number) == tensor.item() == ff.random.fold_in(torch.tensor(key), data).item()
    ours = [kernel.signed(x) for x in kernel.stream(number)]
    assert ours == [x.item() for x in kernel.stream(tensor)] and ours[1] % 2 == 1


@pytest.mark.parametrize("kind", kernel.KINDS)
def test_a_part_is_drawn_as_in_the_whole(kind):
    args = {"uniform": (0, 1), "normal": (0, 1), "integers": (0, 99)}.get(kind, (0.5,))
    shape = (3, 300, 5, 70)
    all_of_it = whole(kind, args, shape)
    for split in ((1,), (3,), (0, 3), (1, 2), (0, 1, 2, 3)):
        part = [n - 1 if d in split else n for d, n in enumerate(shape)]
        where = [part, list(shape), 0, kind, list(args), torch.float64, -1, 1]
        one = [torch.tensor(1)] * len(split)
        got = torch.ops.fx_feather.draw(None, torch.tensor(7), None, one, list(split), *where)
        want = all_of_it[tuple(slice(1, None) if d in split else slice(None) for d in range(4))]
        assert torch.equal(got, want), split


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_microbatches_draw_the_rows_of_the_whole(batch):
    shape = [4, 6, 8]
    some = [n // 2 if d == batch else n for d, n in enumerate(shape)]
    want = whole("normal", (0, 1), shape)
    for k, rows in enumerate(want.chunk(2, batch)):
        where = [some, some, 0, "normal", [0.0, 1.0], torch.float64, batch, 2]
        assert torch.equal(torch.ops.fx_feather.draw(torch.tensor([7, k]), None, None, [], [], *where), rows)


@pytest.mark.parametrize(
    ("kind", "args", "mean", "variance"),
    [
        ("uniform", (-1.0, 3.0), 1.0, 16 / 12),
        ("normal", (1.0, 2.0), 1.0, 4.0),
        ("bernoulli", (0.3,), 0.3, 0.21),
        ("keep", (0.9,), 1.0, 1 / 0.9 - 1),
        ("exponential", (2.0,), 0.5, 0.25),
        ("integers", (-3, 7), 1.5, 99 / 12),
    ],
)
def test_mean_and_variance(kind, args, mean, variance):
    x = whole(kind, args, (N,))
    fourth = (x - mean).pow(4).mean().item() - variance**2
    assert abs(x.mean().item() - mean) < 5 * math.sqrt(variance / N)
    assert abs((x - mean).square().mean().item() - variance) < 5 * math.sqrt(fourth / N) + 1e-12


def test_series_are_logarithms_and_cosines():
    x = torch.cat([torch.linspace(2.0**-33, 1 - 2.0**-33, 100_001, dtype=torch.float64), 2.0 ** -torch.arange(1.0, 33)])
    want = x.log(), (2 * math.pi * x).cos()
    assert ((kernel._log(x.clone()) - want[0]).abs() <= 1e-8 * want[0].abs()).all()
    assert (kernel._cosine(x.clone()) - want[1]).abs().max() < 1e-8


def test_where_numbers_are_tensors_the_bits_are_the_same(monkeypatch):
    """As on a device that is not waited for."""

    def drawn():
        where = [[3, 50], [4, 99], 2, "normal", [0.0, 1.0], torch.float64, 0, 3]
        start = [torch.tensor(1), torch.tensor(49)]
        return torch.ops.fx_feather.draw(torch.tensor([-7, 2]), None, None, start, [0, 1], *where)

    want = drawn()
    monkeypatch.setattr(kernel, "_number", lambda x: x)
    assert torch.equal(drawn(), want)


def chi_square(counts, expected):
    """In standard deviations from what it is for true counts; well above 0 when they are uneven."""
    freedom = counts.numel() - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


def streams():
    """Draws that must have nothing to do with each other: sites, steps, calls, microbatches' keys, near keys."""
    yield "one site", whole("uniform", (0, 1), (N,))
    yield "the next site", whole("uniform", (0, 1), (N,), site=1)
    yield "the next key", whole("uniform", (0, 1), (N,), key=8)
    for step, part, call in ((0, "loss", 0), (1, "loss", 0), (0, "loss", 1), (0, "optimizer", 0)):
        (run,) = ff.draws.run_keys(7, step, part, [call])
        yield f"{part} {step} {call}", whole("uniform", (0, 1), (N,), key=run[0].item())


def test_each_stream_is_even_and_no_two_go_together():
    drawn = dict(streams())
    for name, x in drawn.items():
        assert abs(chi_square(torch.histc(x, 256, 0, 1), N / 256)) < 5, name
        for lag in (1, 2, 3, 64, 1000):  # pairs in one stream
            pairs = (x[:-lag] * 16).floor() * 16 + (x[lag:] * 16).floor()
            assert abs(chi_square(torch.bincount(pairs.long(), minlength=256), len(pairs) / 256)) < 5, (name, lag)
    for (a, x), (b, y) in itertools.combinations(drawn.items(), 2):
        pairs = (x * 16).floor() * 16 + (y * 16).floor()
        assert abs(chi_square(torch.bincount(pairs.long(), minlength=256), N / 256)) < 5, (a, b)


def test_normal_numbers_have_the_tails_of_the_normal_distribution():
    x = whole("normal", (0, 1), (1 << 20,))
    edges = torch.linspace(-3.5, 3.5, 71, dtype=torch.float64)
    share = torch.special.ndtr(edges[1:]) - torch.special.ndtr(edges[:-1])
    counts = torch.histc(x, 70, -3.5, 3.5)
    assert abs((((counts - share * x.numel()) ** 2 / (share * x.numel())).sum().item() - 70) / math.sqrt(140)) < 5
    assert 4.3 < x.max() < 6.8 and -6.8 < x.min() < -4.3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_are_below_one_in_every_dtype(dtype):
    x = whole("uniform", (0, 1), (N,), dtype=dtype)
    assert x.dtype == dtype and x.max() < 1 and x.min() >= 0
    # Narrower numbers are the first digits of wider ones.
    digits = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[dtype]
    assert torch.equal(x.double(), (whole("uniform", (0, 1), (N,)) * 2.0**digits).floor() / 2.0**digits)


def test_masks_are_the_same_in_every_dtype():
    masks = [whole("keep", (0.75,), (999,), dtype=d) != 0 for d in (torch.float64, torch.float32, torch.bfloat16)]
    assert all(torch.equal(m, masks[0]) for m in masks)


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-9])
def test_probabilities_at_the_edges(p):
    share = whole("bernoulli", (p,), (N,)).mean().item()
    assert share == p if p in (0, 1) else share < 1e-4


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (70_000,), (2, 65_536)])
def test_shapes_without_elements_and_larger_than_a_tile(shape):
    assert whole("normal", (0, 1), shape).shape == shape
