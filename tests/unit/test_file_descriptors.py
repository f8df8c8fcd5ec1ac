"""Division of the limit of file descriptors."""

from __future__ import annotations

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.host import file_descriptors
from mansio.host.file_descriptors import (
    ACTIVE_FILES_MIN,
    CACHED_FILES_MIN,
    CONNECTIONS_MIN,
    DESCRIPTORS_PER_CONNECTION,
    descriptor_budget,
)

OPEN_FILES_MIN = ACTIVE_FILES_MIN + CACHED_FILES_MIN


def budget(monkeypatch: pytest.MonkeyPatch, limit: int, connections: int = 4096, files: int = 0):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    return descriptor_budget(connections, files)


@given(st.integers(256, 1 << 21), st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_files_and_connections_of_all_protocols_together_are_within_the_limit(
    limit: int, connections: int, files: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        found = budget(patched, limit, connections, files)
    sockets = (
        DESCRIPTORS_PER_CONNECTION * found.connections + 2 * found.other_connections + found.grpc_connections
    )
    assert sockets + found.active_files + found.cached_files <= limit
    assert found.connections <= connections
    assert found.connections >= min(CONNECTIONS_MIN, connections)
    assert not files or found.active_files + found.cached_files <= max(files, OPEN_FILES_MIN)
    assert found.active_files >= ACTIVE_FILES_MIN
    assert found.cached_files >= CACHED_FILES_MIN


@pytest.mark.parametrize("limit", [20_000, 1 << 20, resource.RLIM_INFINITY])
def test_a_usual_limit_allows_the_connections_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    found = budget(monkeypatch, limit)
    assert found.connections == 4096
    assert found.other_connections == file_descriptors.OTHER_CONNECTIONS_MAX
    assert found.active_files > 7000


def test_fewer_connections_than_the_setting_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = budget(monkeypatch, 1024)
    file_descriptors.log_reductions(found, 4096)
    assert [each.message for each in caplog.records] == ["connection_limit_reduced"]
    caplog.clear()
    file_descriptors.log_reductions(found, found.connections)
    assert not caplog.records
