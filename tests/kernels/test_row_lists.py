"""The ragged list of rows that a batch reads. Would catch: a wrong page or offset, entries of a neighbour or behind the
end written, padding that reads anything but the sink."""

import random

import pytest
import torch

from tidekv.errors import ConfigError
from tidekv.kernels.row_lists import fill_rows_


def test_by_hand(backend, device):
    out = torch.full((10,), -1, device=device)
    indptr = torch.tensor([0, 6, 7, 8], dtype=torch.int32, device=device)
    first = torch.tensor([[40, 12], [24, 0]], device=device)
    assert fill_rows_(out, indptr, first, 4, 6, backend=backend) is out
    assert out.tolist() == [40, 41, 42, 43, 12, 13, 24, 0, -1, -1]  # the third request is padding


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_size", [3, 16, 64])
def test_matches_a_loop(backend, device, dtype, page_size):
    rng = random.Random(page_size)
    lens = [rng.choice([0, 1, page_size, 5 * page_size - 1, rng.randint(1, 40 * page_size)]) for _ in range(7)]
    columns = max(1, -(-max(lens) // page_size))
    first = [[rng.randrange(1000) * page_size for _ in range(columns)] for _ in lens]
    padding = [1, 1]
    indptr = torch.tensor([0, *lens, *padding]).cumsum(0).to(torch.int32)
    total = int(indptr[-1])
    expected = [first[b][t // page_size] + t % page_size for b, n in enumerate(lens) for t in range(n)]
    out = torch.full((total + 3,), -7, dtype=dtype, device=device)
    table = torch.tensor(first, device=device)
    fill_rows_(out, indptr.to(device), table, page_size, max(*lens, 1), backend=backend)
    assert out.tolist() == [*expected, 0, 0, -7, -7, -7]


def test_what_does_not_fit_is_refused(device):
    out, first = torch.zeros(4, dtype=torch.int64, device=device), torch.zeros((2, 2), dtype=torch.int64, device=device)
    with pytest.raises(ConfigError, match="at least 3 entries"):
        fill_rows_(out, torch.zeros(2, dtype=torch.int32, device=device), first, 4, 1)
    with pytest.raises(ConfigError, match="max_len"):
        fill_rows_(out, torch.zeros(3, dtype=torch.int32, device=device), first, 4, 0)
    with pytest.raises(ConfigError, match=r"out must be torch\.int32 or torch\.int64"):
        fill_rows_(out.float(), torch.zeros(3, dtype=torch.int32, device=device), first, 4, 1)
