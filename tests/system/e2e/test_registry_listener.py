"""`mansio serve --registry` has the schema registry at its root, and `mansio schema` the same schemas without HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from support.machine import scaled
from support.paths import free_port
from support.process import served

if TYPE_CHECKING:
    from pathlib import Path

    from support.process import ServedBroker

pytestmark = pytest.mark.row("A7")

FIELDS = [{"name": "id", "type": "long"}]


def schema_command(broker: ServedBroker, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mansio.cli.main", "schema", *arguments, "-b", broker.bootstrap_servers],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


def test_commands_and_the_listener_have_the_same_schemas(tmp_path: Path) -> None:
    first, breaking = tmp_path / "first.avsc", tmp_path / "breaking.avsc"
    first.write_text(json.dumps({"type": "record", "name": "Order", "fields": FIELDS}))
    more = [*FIELDS, {"name": "price", "type": "double"}]
    breaking.write_text(json.dumps({"type": "record", "name": "Order", "fields": more}))
    port = free_port()
    with served(tmp_path / "data", arguments=("--registry", f"127.0.0.1:{port}")) as broker:
        registered = schema_command(broker, "register", "orders-value", str(first), "-o", "json")
        assert registered.returncode == 0, registered.stderr
        (row,) = json.loads(registered.stdout)
        assert (row["subject"], row["version"], row["type"]) == ("orders-value", 1, "AVRO")
        for url in (f"http://127.0.0.1:{port}", f"{broker.http_url}/registry"):
            answer = httpx.get(f"{url}/schemas/ids/{row['id']}", timeout=scaled(30), trust_env=False)
            assert json.loads(answer.json()["schema"])["name"] == "Order"
        checked = schema_command(broker, "check", "orders-value", str(breaking))
        assert checked.returncode == 1
        assert checked.stdout.startswith(
            "not compatible:\n  READER_FIELD_MISSING_DEFAULT_VALUE at /fields/1: "
        )
        refused = schema_command(broker, "register", "orders-value", str(breaking))
        assert refused.returncode == 1
        assert "incompatible with an earlier schema for subject 'orders-value'" in refused.stderr
        assert schema_command(broker, "show", "orders-value").stdout.strip() == json.dumps(
            {"type": "record", "name": "Order", "fields": FIELDS}, separators=(",", ":")
        )
        assert schema_command(broker, "compatibility", "orders-value", "--set", "FULL").stdout == "FULL\n"
        assert schema_command(broker, "delete", "orders-value", "--yes").stdout == "deleted orders-value 1\n"
        assert json.loads(schema_command(broker, "list", "-o", "json").stdout) == []
