"""Every test starts from the same seeds, on one thread: the cores are shared and the tensors are small."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

# Derandomized: the same examples on every machine, so a red run can be repeated. `print_blob` shows how.
settings.register_profile("tidekv", derandomize=True, deadline=None, print_blob=True, database=None)
settings.load_profile("tidekv")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
