"""The choice of a rung, enumerated over every small state against a table written out by hand."""

from itertools import product

import pytest

from oracle import make_allocator
from tidekv import ConfigError
from tidekv.memory.ledger import HIGH, LOW
from tidekv.pressure.ladder import Action, Budgets, PressureState, Rung, choose

# low over budget, high over budget, low can halve, high can halve -> rung (5: nothing left)
TABLE = {
    (0, 0, 0, 0): 5,
    (0, 0, 0, 1): 4,
    (0, 0, 1, 0): 3,
    (0, 0, 1, 1): 3,
    (0, 1, 0, 0): 5,
    (0, 1, 0, 1): 2,
    (0, 1, 1, 0): 3,
    (0, 1, 1, 1): 2,
    (1, 0, 0, 0): 5,
    (1, 0, 0, 1): 4,
    (1, 0, 1, 0): 1,
    (1, 0, 1, 1): 1,
    (1, 1, 0, 0): 5,
    (1, 1, 0, 1): 2,
    (1, 1, 1, 0): 1,
    (1, 1, 1, 1): 1,
}


def test_every_small_state():
    """Catches a rung out of order, a budget compared the wrong way round, a class kept to the other's budget."""
    seen = set()
    for low_used, high_used, low_max, reserved in product(range(4), range(4), range(3), range(3)):
        budgets = Budgets(low_max, reserved, 1)
        for evictable, mergeable, low_can, high_can in product((0, 2), (0, 1), (False, True), (False, True)):
            action = choose(PressureState(evictable, mergeable, low_used, high_used, low_can, high_can, budgets))
            if evictable or mergeable:
                assert action == Action(Rung.EVICT if evictable else Rung.MERGE)
                continue
            rung = TABLE[low_used > low_max, high_used > reserved, low_can, high_can]
            seen.add(rung)
            if rung == 5:
                assert action is None
            else:
                assert action == Action(Rung(rung), *((LOW, low_max) if rung in (1, 3) else (HIGH, reserved)))
    assert seen == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("num_pages", "layer_num", "low", "high", "dynamic"),
    [(10, 8, 2, 6, 2), (100, 30, 6, 87, 7), (320, 30, 20, 280, 20), (1, 2, 0, 0, 1), (7, 61, 0, 6, 1)],
)
def test_default_budgets(num_pages, layer_num, low, high, dynamic):
    assert Budgets.defaults(num_pages, layer_num) == Budgets(low, high, dynamic)
    assert make_allocator(layer_num, num_pages).budgets == Budgets(low, high, dynamic)


def test_budgets_in_pages_or_as_a_fraction():
    a = make_allocator(8, 10, low_max_pages=4, dynamic_max_pages=0.19)
    assert a.budgets == Budgets(4, 5, 1)  # high: what the others leave
    assert make_allocator(8, 10, high_reserved_pages=0.5).budgets == Budgets(2, 5, 2)


@pytest.mark.parametrize("name", ["low_max_pages", "high_reserved_pages", "dynamic_max_pages"])
@pytest.mark.parametrize("value", [-1, 11, 1.5, -0.1])
def test_budgets_out_of_range(name, value):
    with pytest.raises(ConfigError, match=name):
        make_allocator(8, 10, **{name: value})
