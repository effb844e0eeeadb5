import pytest
import torch


@pytest.fixture
def device():
    """Where the ops under test run. What went wrong on the device shows in the test that did it."""
    device = torch.device("cuda")
    yield device
    torch.cuda.synchronize()
