"""Every test of collectives runs over both transports that a CPU has."""

import pytest

from shardwise.core.communication.transports.shared_memory import SWITCH


# Of the module's scope: function-scoped fixtures do not suit hypothesis.
@pytest.fixture(scope="module", params=["1", "0"], ids=["shared memory", "gloo"], autouse=True)
def transport(request):
    """How collectives travel during the tests of a module; the harness passes the variable on to the ranks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(SWITCH, request.param)
        yield request.param
