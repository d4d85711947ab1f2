"""Two virtual hosts for the tests of a file, and the check that no process is left on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distrain.scripts.virtual_hosts import VirtualHosts, missing_tools
from distrain.tests.fakes.host_runs import wait_for


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualHosts]:
    """Two hosts, with two slots each."""
    if missing := missing_tools():
        pytest.skip(missing)
    with VirtualHosts(2, tmp_path_factory.mktemp("hosts")) as made:
        made.write_hostfile(2)
        yield made


@pytest.fixture
def hosts(two_hosts: VirtualHosts) -> Iterator[VirtualHosts]:
    """Two hosts, on which no process that a test started outlives it."""
    yield two_hosts
    wait_for(lambda: not any(host.processes() for host in two_hosts.hosts))
