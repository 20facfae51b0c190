"""Ragged page lists. Would catch: rows in the wrong place, a full last page counted as empty, padding that is listed,
a write past the buffer."""

import random

import pytest
import torch

from tidekv.errors import ConfigError
from tidekv.kernels.page_lists import page_lists


def write(table, kv_lens, page_size, capacity, device, backend):
    """What is written into buffers full of -7."""
    num_requests = len(kv_lens)
    lists = [torch.full((n,), -7, dtype=torch.int32, device=device) for n in (capacity, num_requests + 1, num_requests)]
    page_lists(table.to(device), torch.tensor(kv_lens, device=device), page_size, *lists, backend=backend)
    return [x.tolist() for x in lists]


def test_by_hand(backend, device):
    table = torch.tensor([[7, 3, 0], [9, 0, 0]])
    assert write(table, [5, 4], 4, 5, device, backend) == [[7, 3, 9, -7, -7], [0, 2, 3], [1, 4]]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("num_requests", [1, 3, 129, 300])
def test_matches_a_loop(backend, device, num_requests, page_size):
    rng, columns = random.Random(num_requests), 5 if num_requests > 3 else 600
    lens = [rng.randrange(1, columns * page_size + 1) for _ in range(num_requests)]
    lens[0] = columns * page_size  # full to the last row
    wide = torch.randint(1, 2**31 - 1, (num_requests, columns + 3), generator=torch.Generator().manual_seed(1))
    table = wide[:, :columns]  # columns of a wider buffer need no copy
    indices, indptr, last = write(table, lens, page_size, num_requests * columns, device, backend)
    expected, begins, ends = [], [0], []
    for row, kv_len in zip(table.tolist(), lens, strict=True):
        pages = -(-kv_len // page_size)
        expected += row[:pages]
        begins.append(len(expected))
        ends.append(kv_len - (pages - 1) * page_size)
    assert indices[: len(expected)] == expected
    assert set(indices[len(expected) :]) <= {-7}
    assert indptr == begins
    assert last == ends


def test_nothing_is_written_past_the_buffer(backend, device):
    """A length that the caller's buffer was not made for: the kernel may not write elsewhere."""
    table = torch.arange(1, 9).view(2, 4)
    buffer = torch.full((6,), -7, dtype=torch.int32, device=device)
    others = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 2)]
    lens = torch.tensor([16, 16], device=device)
    page_lists(table.to(device), lens, 4, buffer[:5], *others, backend=backend)
    assert buffer.tolist() == [1, 2, 3, 4, 5, -7]


def test_refusals(device):
    table, lens = torch.ones(2, 3, dtype=torch.int64, device=device), torch.ones(2, dtype=torch.int64, device=device)
    lists = [torch.zeros(n, dtype=torch.int32, device=device) for n in (6, 3, 2)]
    with pytest.raises(ConfigError, match=r"indices must be torch\.int32"):
        page_lists(table, lens, 4, lists[0].long(), *lists[1:])
    with pytest.raises(ConfigError, match="got 2, 2 and 2"):
        page_lists(table, lens, 4, lists[0], lists[2], lists[2])
    with pytest.raises(ConfigError, match="table must have column stride 1"):
        page_lists(table.t().contiguous().t(), lens, 4, *lists)
