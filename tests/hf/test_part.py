"""Parts of file tensors: reading slices is slicing what was read, and writing puts everything back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fx_feather.hf.part import Part, turned, whole

SIZES = {"h": 3, "d": 4, "e": 5, "n": 3, "r": 6}
PARTS = {
    "as it is": whole("w", 4, 5),
    "turned": turned("w", 4, 5),
    "heads": Part(("w",), "(h d) e -> e h d", SIZES),
    "heads out": Part(("w",), "e (h d) -> h d e", SIZES),
    "one of three side by side": Part(("w",), "e (n h d) -> e h d", SIZES, {"n": (1, 2)}),
    "its bias": Part(("w",), "(n h d) -> h d", SIZES, {"n": (2, 3)}),
    "the first rows": Part(("w",), "r e -> e r", SIZES, {"r": (0, 4)}),
    "the last rows": Part(("w",), "r e -> e r", SIZES, {"r": (4, 6)}),
    "a part of each head": Part(("w",), "(h d) r -> r h d", SIZES, {"d": (1, 4)}),
    "stacked": Part(("w0", "w1", "w2"), "o i -> i o", {"o": 4, "i": 5}),
    "scalar": Part(("w",), " -> ", {}),
}


def files(part, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(part.file_shape, generator=g) for name in part.names}


@given(st.sampled_from(sorted(PARTS)), st.data())
def test_a_slice_that_is_read_is_the_slice_of_the_whole(name, data):
    part = PARTS[name]
    tensors = files(part)

    def get(name, slices):
        assert all(s.step is None for s in slices)
        return tensors[name][slices]

    expected = part.read(get)
    assert tuple(expected.shape) == part.shape
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in part.shape]
    slices = tuple(slice(a, b) for a, b in bounds)
    assert torch.equal(part.read(get, slices), expected[slices])


@given(st.sampled_from(sorted(PARTS)))
def test_what_is_written_is_read_again_and_the_rest_is_left(name):
    part = PARTS[name]
    into, value = files(part), torch.randn(part.shape)
    before = {n: x.clone() for n, x in into.items()}
    for n in part.names:
        part.write(value, n, into[n])
    assert torch.equal(part.read(lambda n, s: into[n][s]), value)
    changed = sum(int((into[n] != before[n]).sum()) for n in into)
    assert changed == value.numel()


def test_a_part_of_each_head_by_hand():
    w = torch.arange(12 * 6).view(12, 6)
    value = PARTS["a part of each head"].read(lambda n, s: w[s])
    for r in range(6):
        for h in range(3):
            for d in range(3):
                assert value[r, h, d] == w[h * 4 + d + 1, r]
