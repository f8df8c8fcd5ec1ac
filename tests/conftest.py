"""Fixtures every test may use, and how the suite is run.

Hypothesis runs under one of three profiles (`--hypothesis-profile`): `default` for people, `ci` where `CI` is
set (the same examples on every run), `nightly` for the long column.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from support.process import ServedBroker

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from support.etcd import Etcd

TESTS = Path(__file__).parent

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=5_000)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting makes stays to the end, half a million objects: the collector of garbage looks at them neither
    meanwhile nor later, which is a tenth of a run's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of the tests with Spark looks for them where they all are: to import the others takes ten seconds."""
    wants_spark = config.getoption("markexpr").startswith("spark")
    return (
        True if wants_spark and collection_path.parent == TESTS and collection_path.name != "spark" else None
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a time limit of their own are the long ones: they come first, so that at the end of a run no worker
    is alone with them. The others keep their order, which is by chance."""
    for item in items:
        if item.get_closest_marker("spark") is not None and TESTS / "spark" not in item.path.parents:
            raise pytest.UsageError(f"{item.nodeid} wants Spark, and would not be found outside tests/spark")
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """What a simulation has not begun ends with its test, not in whatever test runs when the collector comes to it."""
    yield
    if (scheduler := sys.modules.get("mansio.testing.scheduler")) is not None:
        scheduler.close_unbegun()


@pytest.fixture
def served_broker(tmp_path: Path) -> Iterator[ServedBroker]:
    """A fresh `mansio serve` in its own process, ready; killed after the test."""
    broker = ServedBroker(tmp_path / "data")
    try:
        yield broker.start()
    finally:
        broker.kill()


@pytest.fixture(scope="session")
def etcd() -> Iterator[Etcd]:
    """An etcd that all tests of this process share, one after the other: keys are found by prefixes of one's own."""
    from support.etcd import one_etcd  # brings gRPC, which few tests need

    with one_etcd() as etcd:
        yield etcd
