"""Encoding, ladder and bytes against numbers worked out by hand. Catches an off-by-one in any of them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import resident_lists, resident_positions
from tidekv import ConfigError, KVGeometry
from tidekv.geometry import narrow_slot_table

LADDERS = {
    2: (2,),
    3: (3,),
    4: (4, 2),
    8: (8, 4, 2),
    28: (28, 14, 7, 3),
    30: (30, 15, 7, 3),
    32: (32, 16, 8, 4, 2),
    36: (36, 18, 9, 4, 2),
    61: (61, 30, 15, 7, 3),
    80: (80, 40, 20, 10, 5, 2),
}


def geometry(layer_num=8, num_pages=10, page_size=4, heads=2, dim=3, dtype=torch.float16):
    return KVGeometry(layer_num, num_pages, page_size, heads, dim, dtype)


def test_the_worked_example():
    g = geometry()
    assert (g.page_stride, g.pool_stride, g.num_combined, g.flat_rows) == (11, 44, 88, 352)
    assert g.encode(3, 5, 2) == 190
    assert g.decode(190) == (3, 5, 2)
    # Its third resident layer lies in cell 4 + 2 of page 3: row (6 * 11 + 3) * 4 + 2.
    assert 190 + 2 * g.pool_stride == (6 * 11 + 3) * 4 + 2 == 278
    # A full-width slot is a page of an ordinary paged pool.
    assert g.encode(3, 1, 2) == 3 * 4 + 2


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_encoding_works_on_arrays_and_tensors(make):
    g = geometry()
    page, start, offset = g.decode(make([190, 14, 0]))
    assert page.tolist() == [3, 3, 0]
    assert start.tolist() == [5, 1, 1]
    assert offset.tolist() == [2, 2, 0]
    assert g.encode(page, start, offset).tolist() == [190, 14, 0]


@given(st.integers(2, 80), st.integers(1, 2**21), st.sampled_from([1, 4, 16, 64]), st.data())
def test_decode_inverts_encode(layer_num, num_pages, page_size, data):
    """Catches an encoding that loses a bit anywhere in the range of real machines."""
    g = geometry(layer_num, num_pages, page_size)
    triple = tuple(data.draw(st.integers(*r)) for r in ((0, num_pages), (1, layer_num), (0, page_size - 1)))
    loc = g.encode(*triple)
    assert 0 <= loc < g.flat_rows
    assert g.decode(loc) == triple


@pytest.mark.parametrize("layer_num", LADDERS)
def test_ladder(layer_num):
    g = geometry(layer_num)
    assert g.widths == LADDERS[layer_num]
    for level, width in enumerate(g.widths):
        assert g.level_of_width(width) == level
        assert list(g.resident_layers(width)) == resident_lists(layer_num, 2)[level]
        starts = g.slot_starts(width)
        assert len(starts) == 2**level
        assert all(b - a >= width for a, b in itertools.pairwise(starts))
        assert starts[-1] + width - 1 <= layer_num
        if level:  # halving keeps every slot where it is
            assert set(g.slot_starts(g.widths[level - 1])) < set(starts)
    assert np.array_equal(narrow_slot_table(g, g.widths), resident_positions(layer_num, 2))


def test_resident_layers_by_hand():
    assert geometry(8).resident_layers(4) == (0, 2, 4, 6)
    assert geometry(8).resident_layers(2) == (0, 4)
    g = geometry(30)
    assert g.resident_layers(15) == tuple(range(0, 29, 2))
    assert g.resident_layers(7) == (0, 4, 8, 12, 16, 20, 24)
    assert g.resident_layers(3) == (0, 8, 16)
    assert g.slot_starts(15) == (1, 16)
    assert g.slot_starts(7) == (1, 8, 16, 23)
    assert geometry(61).slot_starts(30) == (1, 31)  # cell 61 is left over


def test_min_slot_width():
    assert geometry(8).ladder(1) == (8, 4, 2, 1)
    assert geometry(8).ladder(3) == (8, 4)
    assert geometry(8).ladder(8) == (8,)
    for bad in (0, 9, -1):
        with pytest.raises(ConfigError, match="min_slot_width"):
            geometry(8).ladder(bad)
    with pytest.raises(ConfigError, match="width 5"):
        geometry(8).level_of_width(5)


def test_bytes():
    g = geometry()  # K and V, 2 heads, 3 wide, 2 bytes
    assert g.token_bytes_per_layer == 24
    assert g.cell_bytes == 96
    assert g.page_bytes == 768
    assert g.pool_bytes == 11 * 768
    assert KVGeometry.pages_for_bytes(g.pool_bytes, g.page_bytes) == 10
    assert KVGeometry.pages_for_bytes(g.pool_bytes - 1, g.page_bytes) == 9


def test_large_pools_pass_int32_and_stay_exact():
    g = KVGeometry(32, 2**20, 64, 8, 128, torch.bfloat16)
    assert g.flat_rows == 32 * (2**20 + 1) * 64 > 2**31
    last = g.encode(torch.tensor([2**20]), torch.tensor([32]), torch.tensor([63]))
    assert last.dtype == torch.int64
    assert int(last) == g.flat_rows - 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer_num", 1), ("layer_num", 2.5), ("num_pages", 0), ("page_size", 0), ("num_kv_heads", 0), ("head_dim", -1)],
)
def test_geometry_that_cannot_work(field, value):
    values = {"layer_num": 8, "num_pages": 10, "page_size": 4, "num_kv_heads": 1, "head_dim": 1, "dtype": torch.float32}
    with pytest.raises(ConfigError, match=field):
        KVGeometry(**{**values, field: value})


def test_geometry_refuses_what_exceeds_int64_and_a_strange_dtype():
    with pytest.raises(ConfigError, match="int64"):
        KVGeometry(80, 2**50, 64, 8, 128, torch.float16)
    with pytest.raises(ConfigError, match="dtype"):
        KVGeometry(8, 10, 4, 1, 1, "float16")
