"""Fixtures that every test may use, and the division of a run: tiers, machine factor, optional packages.

`--tier` selects how much runs (`support.tiers`). Time limits are multiplied by the measured factor of the machine
(`support.machine`). The order of tests and every random choice are fixed, except in the tier `nightly`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import machine, outcomes, tiers
from support.process import ServedBroker

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from support.etcd import Etcd

TESTS = Path(__file__).parent

OPEN_FILES = 1024
"""Soft limit of open files of a process with tests: what most systems give to an ordinary user."""

OPTIONAL_PACKAGES = {
    "spark": ("pyspark", "pyarrow", "pyiceberg"),
    "test_signals.py": ("py4j",),
    "test_certificate_names_java.py": ("py4j", "pyspark"),
    "test_public_api.py": ("pyspark", "pyarrow", "pyiceberg"),
    "test_first_errors.py": ("pyspark", "pyarrow"),
    "test_coming_from.py": ("pyarrow", "pyiceberg"),
    "test_lake_duckdb.py": ("pyiceberg", "pyarrow", "duckdb", "duckdb_extension_iceberg"),
    "test_functions.py": ("pyspark", "pyarrow", "fastavro"),
    "test_decoded_values.py": ("pyspark", "pyarrow", "pyiceberg", "fastavro"),
    "test_public_spark.py": ("pyspark", "pyarrow", "pyiceberg", "fastavro"),
    "test_schema_avro.py": ("pyspark", "pyarrow", "fastavro"),
    "test_column_decoders.py": ("pyspark", "pyarrow", "fastavro"),
}
"""Packages that a test module, or those of a directory, import and that a development install may lack."""

WITHOUT_PACKAGES_IN_CI = {"test_lake_duckdb.py"}
"""Modules whose packages `make full` installs and `make test` does not."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=tiers.TIERS,
        default=tiers.TIERS[0],
        help="test: without tests marked `full`; full: all, with more examples; nightly: all, with random seeds",
    )
    outcomes.add_option(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    tiers.choose(config.getoption("tier"))
    outcomes.configure(config)
    _lower_file_limit()
    machine.factor()  # measured in the process that starts the workers, inherited by them
    if tiers.tier() != "nightly" and getattr(config.option, "randomly_seed", None) == "default":
        config.option.randomly_seed = tiers.FIXED_SEED


def _lower_file_limit() -> None:
    """Give the tests of every machine the limit of open files that an ordinary user has. Brokers that are processes
    raise theirs."""
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not 0 <= soft <= OPEN_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))


def pytest_report_header() -> str:
    return f"tier: {tiers.tier()}, machine factor: {machine.factor():.2f}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collected objects (half a million) live until the end: excluded from garbage collection, a tenth of a run's
    time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


class ModuleWithMissingPackage(pytest.Module):
    """A test module that cannot be imported here: one skipped item with the reason."""

    missing = ""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"{self.missing} is missing: `make setup` installs it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip modules whose optional packages are missing; with CI set, importing them fails instead."""
    if os.environ.get("CI") and module_path.name not in WITHOUT_PACKAGES_IN_CI:
        return None
    names = OPTIONAL_PACKAGES.get(module_path.name) or OPTIONAL_PACKAGES.get(module_path.parent.name, ())
    for name in names:
        if importlib.util.find_spec(name) is None:
            module = ModuleWithMissingPackage.from_parent(parent, path=module_path)
            module.missing = name
            return module
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests with a time limit of their own are the long ones and come first, so that at the end of a run no worker
    is alone with them. The others keep their order."""
    for item in items:
        if item.get_closest_marker("spark") is not None and item.path.parent.name != "spark":
            raise pytest.UsageError(
                f"{item.nodeid} wants Spark, and would not be found outside a directory `spark`"
            )
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    _select_tier(config, items)


def _select_tier(config: pytest.Config, items: list[pytest.Item]) -> None:
    if tiers.tier() != "test":
        return
    beyond = [item for item in items if item.get_closest_marker("full") is not None]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if item.get_closest_marker("full") is None]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Multiply the time limit of each test by the factor of the machine, as it is when the test begins."""
    if item.config.pluginmanager.has_plugin("timeout"):
        marker = item.get_closest_marker("timeout")
        default_s = item.config.getoption("timeout") or item.config.getini("timeout") or 0
        limit_s = float(marker.args[0] if marker is not None and marker.args else default_s)
        if limit_s > 0:
            item.add_marker(pytest.mark.timeout(machine.scaled(limit_s)), append=False)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Coroutines that a simulation never started are closed with its test, not in whatever test runs when the
    garbage collector reaches them."""
    yield
    if (scheduler := sys.modules.get("mansio.testing.scheduler")) is not None:
        scheduler.close_unstarted()


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
