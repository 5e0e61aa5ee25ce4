import jaxtyping
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread_per_worker():
    """`make test` runs two workers; torch would give each of them all cores."""
    torch.set_num_threads(1)


@pytest.fixture
def unchecked(monkeypatch):
    """Turns jaxtyping's checks off, which would answer before the function itself does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
