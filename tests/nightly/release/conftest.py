"""The distributions of this source tree, built once per test run."""

from __future__ import annotations

import pytest

from support.environments import Distributions, build_distributions


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    base = tmp_path_factory.getbasetemp()
    in_worker = base.name.startswith("popen-")
    return build_distributions((base.parent if in_worker else base) / "distributions")
