"""What separates a program from the machine, in the tests that run one."""

import pytest

from paceline.tasks import execution


@pytest.fixture(params=["namespace", "interpreter"])
def barrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "interpreter":
        monkeypatch.setattr(execution, "_can_unshare", lambda: False)
    elif execution.network_barrier() != request.param:
        pytest.skip("this system has no name spaces for its users")
    return request.param
