"""The device that a state lives on: every rule holds on all of them."""

import pytest


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param
