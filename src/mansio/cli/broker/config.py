"""`mansio config`: what a broker would run with, and why."""

from __future__ import annotations

from typing import Any

import typer

from mansio.cli.broker.serve_options import (
    AdvertiseOption,
    ConfigOption,
    DataOption,
    EtcdOption,
    HttpOption,
    JoinOption,
    KafkaOption,
    NodeIdOption,
    RackOption,
    SetOption,
    settings_from_flags,
)
from mansio.cli.support.formatting import Output, OutputOption, show_rows

app = typer.Typer(no_args_is_help=True, help="The settings of a broker.")


@app.callback()
def command_group() -> None:
    """The settings of a broker."""


@app.command()
def show(
    data: DataOption = None,
    kafka: KafkaOption = None,
    http: HttpOption = None,
    node_id: NodeIdOption = None,
    advertise: AdvertiseOption = None,
    rack: RackOption = None,
    etcd: EtcdOption = None,
    join: JoinOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show every setting `mansio serve` would use with the same flags, and where each value comes from.

    Origins, later ones win: default, file, environment (MANSIO_<NAME>), flag.
    """
    from mansio.config.settings import SPECIFICATIONS

    named = {
        "data_dir": data,
        "listeners": kafka,
        "http_listener": http,
        "node_id": node_id,
        "advertised_listeners": advertise,
        "broker_rack": rack,
        "etcd_endpoints": etcd,
        "etcd_join": join,
    }
    settings = settings_from_flags(named, config, set_)
    rows: list[dict[str, Any]] = []
    for name, specification in SPECIFICATIONS.items():
        value = getattr(settings, name)
        rows.append(
            {
                "name": name,
                "value": dict(value) if name == "topic_defaults" else value,
                "unit": specification.unit,
                "origin": str(settings.origin(name)),
                "meaning": specification.meaning,
            }
        )
    show_rows(output, rows, ["name", "value", "unit", "origin"], empty="no settings")
