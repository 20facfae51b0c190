"""Locations after slots moved. Would catch: a lost offset, a sink that moves, columns or rows touched that were not
asked for."""

import random

import pytest
import torch

from tidekv.errors import ConfigError
from tidekv.kernels.remap import remap_locs_, remap_rows_


def make_lut(num_combined, seed, device):
    targets = list(range(1, num_combined))
    random.Random(seed).shuffle(targets)
    return torch.tensor([0, *targets], dtype=torch.int64, device=device)


def test_by_hand(backend, device):
    lut = torch.arange(60, device=device)
    lut[47] = 14
    locs = torch.tensor([190, 188, 191, 0, 3, 187, -1], device=device)  # DESIGN's example: 190 = slot 47, offset 2
    assert remap_locs_(locs, lut, 4, backend=backend) is locs
    assert locs.tolist() == [58, 56, 59, 0, 3, 187, -1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_locs_match_a_loop(backend, device, dtype, page_size):
    lut = make_lut(50, page_size, device)
    table = lut.tolist()
    locs = (
        torch.randint(0, 50 * page_size, (3, 5, 101), generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    )
    expected = [table[x // page_size] * page_size + x % page_size for x in locs.flatten().tolist()]
    remap_locs_(locs, lut, page_size, backend=backend)
    assert locs.flatten().tolist() == expected
    assert locs.dtype == dtype


def test_int64_locs_beyond_32_bits(backend, device):
    lut = torch.tensor([0, 1 << 36, 5], device=device)
    locs = torch.tensor([7, 9], device=device)
    assert remap_locs_(locs, lut, 4, backend=backend).tolist() == [(1 << 38) + 3, 21]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_touch_only_the_named_rows_and_columns(backend, device, dtype):
    page_size, max_len = 4, 1100  # two blocks of columns
    lut = make_lut(40, 7, device)
    table = lut.tolist()
    whole = torch.randint(0, 160, (6, 1300), generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    pool = whole[:, :1200]  # rows of a wider buffer: the row stride is not the width
    before = whole.tolist()
    remap_rows_(pool, torch.tensor([4, 1], device=device), max_len, lut, page_size, backend=backend)
    for r, row in enumerate(whole.tolist()):
        cut = max_len if r in (1, 4) else 0
        assert row[:cut] == [table[x // page_size] * page_size + x % page_size for x in before[r][:cut]]
        assert row[cut:] == before[r][cut:]


def test_nothing_to_do(backend, device):
    lut = make_lut(4, 0, device)
    pool = torch.ones(2, 3, dtype=torch.int32, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    remap_rows_(pool, none, 3, lut, 4, backend=backend)
    remap_rows_(pool, torch.tensor([1], device=device), 0, lut, 4, backend=backend)
    remap_locs_(none, lut, 4, backend=backend)
    assert pool.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_refusals_name_the_value(device):
    lut = make_lut(4, 0, device)
    pool = torch.zeros(4, 6, dtype=torch.int64, device=device)
    with pytest.raises(ConfigError, match="locs must be contiguous"):
        remap_locs_(pool[:, :3], lut, 4)
    with pytest.raises(ConfigError, match=r"max_len must be in \[0, 6\], got 7"):
        remap_rows_(pool, torch.tensor([1], device=device), 7, lut, 4)
    with pytest.raises(ConfigError, match=r"lut must be torch.int64"):
        remap_locs_(pool, lut.int(), 4)
