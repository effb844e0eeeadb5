import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The models here are too small to be worth sharing among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
