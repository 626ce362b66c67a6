"""What every test shares: one thread a process, fresh memory filled with NaN, errors measured one way."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _repeatable_and_poisoned() -> None:
    """Fixed seed; `torch.empty` gives NaN, so that a value nobody wrote cannot pass for a result."""
    torch.manual_seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=False)
    yield
    torch.use_deterministic_algorithms(False)
