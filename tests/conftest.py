import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread_per_worker():
    """`make test` runs two workers; torch would give each of them all cores."""
    torch.set_num_threads(1)
