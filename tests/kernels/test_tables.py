"""Where each layer lies. Would catch: a stride or level mixed up, padding that reads a real page, a layer read from
another layer's cell."""

import random

import pytest
import torch

from tidekv.errors import ConfigError
from tidekv.kernels.tables import layer_tables, token_rows

# L = 8: {0..7}, {0, 2, 4, 6}, {0, 4}
RESIDENT_8 = [[0, 1, 2, 3, 4, 5, 6, 7], [0, -1, 1, -1, 2, -1, 3, -1], [0, -1, -1, -1, 1, -1, -1, -1]]


def maps(device):
    resident_pos = torch.tensor(RESIDENT_8, dtype=torch.int32, device=device)
    position = torch.tensor([0, 1] * 4, dtype=torch.int32, device=device)
    return resident_pos, position


def naive_page(combined, dynamic, level, layer, page_stride):
    if combined == 0:
        return 0
    j = RESIDENT_8[level][layer]
    if j >= 0:
        return combined + j * page_stride
    return dynamic + (layer % 2) * page_stride if dynamic > 0 else 0


def test_tables_by_hand(backend, device):
    # P = 10. Slot 47 = page 3, slot_start 5, at level 1; its dynamic slot is 9. Slot 6 is full width. The third column
    # is padding.
    combined = torch.tensor([[47, 6, 0]], device=device)
    dynamic = torch.tensor([[9, 0, 0]], device=device)
    level = torch.tensor([[1, 0, 0]], dtype=torch.uint8, device=device)
    layers = torch.tensor([0, 4, 5], device=device)
    tables = layer_tables(combined, dynamic, level, *maps(device), layers, 11, backend=backend)
    assert tables.tolist() == [[[47, 6, 0]], [[47 + 22, 6 + 44, 0]], [[9 + 11, 6 + 55, 0]]]


@pytest.mark.parametrize("level_dtype", [torch.uint8, torch.int8])
def test_tables_match_a_loop(backend, device, level_dtype):
    rng, stride, b, n = random.Random(3), (1 << 29) + 1, 5, 130  # stride: entries pass 2**31
    combined = [[rng.choice([0, rng.randrange(1, stride)]) for _ in range(n)] for _ in range(b)]
    dynamic = [[rng.choice([0, rng.randrange(1, stride)]) for _ in range(n)] for _ in range(b)]
    level = [[rng.randrange(3) for _ in range(n)] for _ in range(b)]
    layers = [7, 0, 3, 4]
    # Columns of wider buffers: a batch shorter than its buffers needs no copy.
    pad = torch.full((b, 20), 77, device=device)
    wide = [torch.cat([torch.tensor(x, device=device), pad], 1)[:, :n] for x in (combined, dynamic)]
    levels = torch.cat([torch.tensor(level, device=device), pad], 1).to(level_dtype)[:, :n]
    got = layer_tables(*wide, levels, *maps(device), torch.tensor(layers, device=device), stride, backend=backend)
    for i, layer in enumerate(layers):
        expected = [
            [naive_page(combined[r][c], dynamic[r][c], level[r][c], layer, stride) for c in range(n)] for r in range(b)
        ]
        assert got[i].tolist() == expected


def test_token_rows_by_hand(backend, device):
    # page_size 4, row_stride 44. Token 0: slot 47 offset 2 (loc 190) at level 1, staged at slot 9 offset 2 (loc 38).
    # Token 1: full width, loc 25.
    locs, staged = torch.tensor([190, 25], device=device), torch.tensor([38, 0], device=device)
    level = torch.tensor([1, 0], dtype=torch.uint8, device=device)
    assert token_rows(locs, staged, level, 6, *maps(device), 44, backend=backend).tolist() == [190 + 132, 25 + 264]
    assert token_rows(locs, staged, level, 3, *maps(device), 44, backend=backend).tolist() == [38 + 44, 25 + 132]
    assert token_rows(locs, None, None, 6, *maps(device), 44, backend=backend).tolist() == [190 + 264, 25 + 264]


def test_token_rows_match_a_loop(backend, device):
    rng, stride = random.Random(4), (1 << 31) + 44
    locs, staged = ([rng.randrange(1, stride) for _ in range(700)] for _ in range(2))
    level = [rng.randrange(3) for _ in range(700)]
    tensors = torch.tensor(locs, device=device), torch.tensor(staged, device=device)
    levels = torch.tensor(level, dtype=torch.int8, device=device)
    every = token_rows(*tensors, levels, None, *maps(device), stride, backend=backend)
    assert every.shape == (8, 700)
    for layer in range(8):
        got = token_rows(*tensors, levels, layer, *maps(device), stride, backend=backend).tolist()
        assert every[layer].tolist() == got
        for t in range(700):
            j = RESIDENT_8[level[t]][layer]
            assert got[t] == (locs[t] + j * stride if j >= 0 else staged[t] + layer % 2 * stride)


def test_empty_and_refusals(backend, device):
    none = torch.empty(0, 4, dtype=torch.int64, device=device)
    level = none.to(torch.uint8)
    layers = torch.tensor([1], device=device)
    assert layer_tables(none, none, level, *maps(device), layers, 11, backend=backend).shape == (1, 0, 4)
    locs = torch.tensor([5], device=device)
    with pytest.raises(ConfigError, match=r"layer must be in \[0, 8\), got 8"):
        token_rows(locs, None, None, 8, *maps(device), 44)
    with pytest.raises(ConfigError, match="given together"):
        token_rows(locs, locs, None, 1, *maps(device), 44)
    with pytest.raises(ConfigError, match="level must have combined's shape"):
        layer_tables(none, none, level[:, :2], *maps(device), layers, 11)
