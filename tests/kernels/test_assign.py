"""Which location each new token gets. Would catch: a wrong cumulative sum, the caller's order lost, a last page not
filled up first."""

import random

import pytest
import torch

from tidekv.errors import ConfigError
from tidekv.kernels.assign import alloc_decode, alloc_extend


def int64(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


def naive_extend(prefix, seq, last, slots, page_size):
    """One token at a time, straight from the contract."""
    slots = iter(slots)
    placed = []
    for start, end, loc in zip(prefix, seq, last, strict=True):
        for pos in range(start, end):
            loc = next(slots) * page_size if pos % page_size == 0 else loc + 1
            placed.append(loc)
    assert next(slots, None) is None, "the case must use all its slots"
    return placed


def random_case(rng, bs, page_size, decode=False):
    prefix, seq, last = [], [], []
    for _ in range(bs):
        p = rng.choice([0, rng.randrange(0, 5 * page_size)])
        prefix.append(p)
        seq.append(p + (1 if decode else rng.choice([0, 1, page_size, rng.randrange(0, 4 * page_size)])))
        last.append(rng.randrange(1, 1 << 33) * page_size + (p - 1) % page_size)
    pages = sum(-(-s // page_size) - -(-p // page_size) for p, s in zip(prefix, seq, strict=True))
    slots = rng.sample(range(1, 1 << 33), pages)  # past 2**31: locations must stay int64
    return prefix, seq, last, slots


def test_extend_by_hand(backend, device):
    # page_size 4. Request 0: 6 -> 11 fills offsets 2, 3 of page 3, then slot 7. Request 1: 0 -> 5 takes slots 47 and
    # 2. Request 2: nothing.
    args = [int64(x, device) for x in ([6, 0, 4], [11, 5, 4], [13, -1, 31], [7, 47, 2])]
    out = alloc_extend(*args, 10, 4, backend=backend)
    assert out.tolist() == [14, 15, 28, 29, 30, 188, 189, 190, 191, 8]
    assert out.dtype == torch.int64


def test_decode_by_hand(backend, device):
    args = [int64(x, device) for x in ([9, 7, 1], [15, 21, -1], [5, 47])]
    assert alloc_decode(*args, 4, backend=backend).tolist() == [20, 22, 188]


@pytest.mark.parametrize(("bs", "page_size"), [(1, 1), (1, 16), (7, 4), (9, 1), (40, 16), (12, 3)])
def test_extend_matches_one_token_at_a_time(backend, device, bs, page_size):
    prefix, seq, last, slots = random_case(random.Random(bs * 100 + page_size), bs, page_size)
    expected = naive_extend(prefix, seq, last, slots, page_size)
    args = [int64(x, device) for x in (prefix, seq, last, slots)]
    assert alloc_extend(*args, len(expected), page_size, backend=backend).tolist() == expected


@pytest.mark.parametrize(("bs", "page_size"), [(1, 1), (1, 16), (7, 4), (9, 1), (1024, 4), (2500, 8)])
def test_decode_matches_one_token_at_a_time(backend, device, bs, page_size):
    # bs 2500: three blocks of requests, so earlier blocks are counted.
    prefix, seq, last, slots = random_case(random.Random(bs * 100 + page_size), bs, page_size, decode=True)
    expected = naive_extend(prefix, seq, last, slots, page_size)
    args = [int64(x, device) for x in (seq, last, slots)]
    assert alloc_decode(*args, page_size, backend=backend).tolist() == expected


def test_extend_of_a_large_batch(backend, device):
    # Each request has one token on its own page. 1,030 requests are 2,048 lanes with 8 warps; the interpreter takes
    # milliseconds a request.
    bs = 1030 if device == "cuda" else 70
    zeros, ones = torch.zeros(bs, dtype=torch.int64, device=device), torch.ones(bs, dtype=torch.int64, device=device)
    slots = torch.arange(bs, 0, -1, device=device)
    assert torch.equal(alloc_extend(zeros, ones, zeros, slots, bs, 4, backend=backend), slots * 4)


def test_a_run_of_a_longer_list_of_slots(backend, device):
    args = [int64(x, device) for x in ([9, 7, 1], [15, 21, -1], [99, 98, 5, 47, 97])]
    assert alloc_decode(*args, 4, run=(2, 2), backend=backend).tolist() == [20, 22, 188]
    args = [int64(x, device) for x in ([6, 0, 4], [11, 5, 4], [13, -1, 31], [99, 7, 47, 2, 98])]
    out = alloc_extend(*args, 10, 4, run=(1, 3), backend=backend)
    assert out.tolist() == [14, 15, 28, 29, 30, 188, 189, 190, 191, 8]
    with pytest.raises(ConfigError, match=r"run must be \(first, count\) within the 5 new_slots, got \(3, 3\)"):
        alloc_extend(*args, 10, 4, run=(3, 3), backend=backend)


def test_empty_batches(backend, device):
    none = int64([], device)
    assert alloc_extend(none, none, none, none, 0, 4, backend=backend).tolist() == []
    assert alloc_decode(none, none, none, 4, backend=backend).tolist() == []


def test_a_wrong_dtype_or_length_is_named(device):
    good = int64([4, 5], device)
    with pytest.raises(ConfigError, match=r"seq_lens must be torch.int64, got torch.int32"):
        alloc_decode(good.int(), good, good, 4)
    with pytest.raises(ConfigError, match="prefix_lens must have 2 entries as last_loc has, got 1"):
        alloc_extend(good[:1], good, good, good, 1, 4)
    with pytest.raises(ConfigError, match="page_size must be at least 1, got 0"):
        alloc_decode(good, good, good, 0)
    with pytest.raises(ConfigError, match="backend must be"):
        alloc_decode(good, good, good, 4, backend="cuda")
