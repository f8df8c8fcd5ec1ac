"""`mansio pipeline schema-check`: compares versions of a JSON Schema, or validates a topic's records.

Invariants:
* The exit code is 1 if there is a violation, for use in a build.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.pipeline import ConfOption, MasterOption, RemoteOption, SkipCheckOption, start_session
from mansio.cli.support.common import DEFAULT_BOOTSTRAP_SERVERS, BootstrapServersOption, usage_error
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_rows, show_table
from mansio.pipelines.schema_compatibility import Compatibility, breaking_changes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mansio.pipelines.schema_check import CheckReport

CHANGE_COLUMNS = ("from", "to", "path", "breaks", "change")
GROUP_COLUMNS = ("records", "place", "rule", "partition", "offset", "reason")


def register(app: typer.Typer) -> None:
    """Add the command `schema-check` to `mansio pipeline`."""
    app.command("schema-check")(schema_check)


def schema_check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="DIR|TOPIC", help="A directory of schema versions (v1.json, v2.json, ...), or a topic."
        ),
    ],
    schema: Annotated[
        str | None,
        typer.Option(
            "--schema", "-s", metavar="FILE", help="Check the topic's records against this JSON Schema."
        ),
    ] = None,
    quarantine: Annotated[
        str | None,
        typer.Option(
            "--quarantine",
            metavar="TOPIC",
            help="Write invalid records to this topic, with the reason as a header; created if it does not exist.",
        ),
    ] = None,
    compatibility: Annotated[
        Compatibility,
        typer.Option(
            "--compatibility",
            help="Required compatibility: new readers of old records, old readers of new ones.",
        ),
    ] = Compatibility.FULL,
    master: MasterOption = None,
    remote: RemoteOption = None,
    conf: ConfOption = None,
    skip_check: SkipCheckOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Find breaking changes between versions of a JSON Schema, or records that violate one.

    Without --schema, each version in a directory is compared with the previous one. With it, every value of the topic
    is validated. The exit code is 1 if there is a violation.
    """
    if schema is None:
        if quarantine is not None:
            usage_error("requires a topic and --schema", "--quarantine")
        _check_versions(target, compatibility, output)
    else:
        from mansio.host.extras import require_extra

        loaded = _read_schema(schema)
        require_extra("jsonschema")
        spark = start_session(
            master,
            f"mansio schema-check {target}",
            remote=remote,
            bootstrap_servers=bootstrap_servers,
            skip_check=skip_check,
            conf=conf,
        )
        _check_records(spark, target, loaded, quarantine, output, bootstrap_servers)


def _check_versions(directory: str, compatibility: Compatibility, output: Output) -> None:
    if not os.path.isdir(directory):
        usage_error(f"{directory} is not a directory; a topic requires --schema FILE", "DIR|TOPIC")
    names = sorted((name for name in os.listdir(directory) if name.endswith(".json")), key=_version_sort_key)
    versions = [(name.removesuffix(".json"), _read_schema(os.path.join(directory, name))) for name in names]
    if len(versions) < 2:
        usage_error(
            f"{directory} has {len(versions)} versions (*.json); at least two are required", "DIR|TOPIC"
        )
    rows: list[dict[str, Any]] = []
    for (old_name, old), (new_name, new) in pairwise(versions):
        for change in breaking_changes(old, new, compatibility):
            who = "old records" if change.breaks is Compatibility.BACKWARD else "old readers"
            rows.append(
                {
                    "from": old_name,
                    "to": new_name,
                    "path": change.path,
                    "breaks": who,
                    "change": change.message,
                }
            )
    show_rows(output, rows, CHANGE_COLUMNS, empty=f"nothing breaks in {len(versions)} versions")
    if rows:
        raise typer.Exit(1)


def _version_sort_key(name: str) -> list[tuple[int, str]]:
    """Sort key of a file name that orders numbers by value: v2 before v10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read_schema(path: str) -> Any:
    from mansio.errors import ConfigError

    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the schema {path} cannot be read: {error}") from error


def _check_records(
    spark: SparkSession,
    topic: str,
    schema: Any,
    quarantine: str | None,
    output: Output,
    bootstrap_servers: str,
) -> None:
    from mansio.pipelines.schema_check import check_topic

    report = check_topic(spark, topic, bootstrap_servers, schema, quarantine=quarantine)
    if output is Output.JSON:
        show_json({"topic": topic, **asdict(report)})
    else:
        _show(report)
    if report.invalid:
        raise typer.Exit(1)


def _show(report: CheckReport) -> None:
    rows = [
        ("records", f"{report.records:,}"),
        ("without a value", f"{report.without_value:,}"),
        ("bad", f"{report.invalid:,}"),
    ]
    show_table(("what", "count"), rows)
    if report.groups:
        print()
        show_rows(Output.TABLE, [asdict(group) for group in report.groups], GROUP_COLUMNS, empty="")
    if report.invalid and report.quarantine is not None:
        print(f"\n{report.invalid:,} invalid records were written to {report.quarantine}")
