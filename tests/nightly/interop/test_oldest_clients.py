"""The oldest versions of stock clients that are tested, each in an environment of its own.

`oldest_clients/versions.json` names them, and the page on compatibility lists them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from support.environments import Environment
from support.paths import free_port
from support.process import served

SCRIPTS: Final = Path(__file__).parent / "oldest_clients"
VERSIONS: Final[dict[str, str]] = json.loads((SCRIPTS / "versions.json").read_text(encoding="utf-8"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("distribution", VERSIONS)
def test_the_oldest_tested_version_of_a_client_works(distribution: str, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.pip("install", "--quiet", f"{distribution}=={VERSIONS[distribution]}", seconds=300)
    sqs = f"127.0.0.1:{free_port()}"
    with served(tmp_path / "data", arguments=("--set", f"sqs_listener={sqs}")) as broker:
        address = f"http://{sqs}" if distribution == "boto3" else broker.bootstrap_servers
        script = SCRIPTS / f"{distribution.replace('-', '_')}_client.py"
        environment.run("python", str(script), address, "orders", seconds=180)
