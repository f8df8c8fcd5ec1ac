"""`mansio config`: effective settings of a broker and their origins; the flags of `mansio serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.support.common import parse_name_values, usage_error
from mansio.cli.support.formatting import Output, OutputOption, show_rows
from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.config.settings import Settings

app = typer.Typer(no_args_is_help=True, help="The settings of a broker.")


@app.callback()
def command_group() -> None:
    """The settings of a broker."""


@app.command()
def show(
    data: DataOption = None,
    kafka: KafkaOption = None,
    http: HttpOption = None,
    registry: RegistryOption = None,
    sqs: SqsOption = None,
    grpc: GrpcOption = None,
    node_id: NodeIdOption = None,
    advertise: AdvertiseOption = None,
    rack: RackOption = None,
    etcd: EtcdOption = None,
    join: JoinOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    dev: DevOption = False,
    secure: SecureOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show all settings of `mansio serve` with the same flags, and the origin of each value.

    Origins in increasing precedence: default, file, environment (MANSIO_<NAME>), flag.
    """
    from mansio.config.settings import SPECIFICATIONS

    named = {
        "data_dir": data,
        "listeners": kafka,
        "http_listener": http,
        "registry_listener": registry,
        "sqs_listener": sqs,
        "grpc_listener": grpc,
        "node_id": node_id,
        "advertised_listeners": advertise,
        "broker_rack": rack,
        "etcd_endpoints": etcd,
        "etcd_join": join,
    }
    settings = settings_from_flags(named, config, set_, dev=dev, secure=secure)
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


SETTING_FLAGS = {
    "data_dir": "--data",
    "listeners": "--kafka",
    "advertised_listeners": "--advertise",
    "http_listener": "--http",
    "registry_listener": "--registry",
    "sqs_listener": "--sqs",
    "grpc_listener": "--grpc",
    "node_id": "--node-id",
    "broker_rack": "--rack",
    "etcd_endpoints": "--etcd",
    "etcd_join": "--join",
}
"""The flag of each setting that has one."""

DataOption = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="Data directory. [default: mansio-data]"),
]
KafkaOption = Annotated[
    str | None,
    typer.Option(
        "--kafka",
        metavar="LISTENERS",
        help="Listener of the Kafka protocol, HOST:PORT, or several, NAME://HOST:PORT,...; port 0: a free one. "
        "[default: 127.0.0.1:9092]",
    ),
]
HttpOption = Annotated[
    str | None,
    typer.Option(
        "--http",
        metavar="HOST:PORT",
        help="Listener of the HTTP API, health checks and metrics; empty: off. [default: 127.0.0.1:9080]",
    ),
]
GrpcOption = Annotated[
    str | None,
    typer.Option(
        "--grpc",
        metavar="HOST:PORT",
        help="Listener of the gRPC API, for example 127.0.0.1:50051; needs the extra grpc. [default: off]",
    ),
]
RegistryOption = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="HOST:PORT",
        help="Serve the schema registry at the root of this address, too. [default: off]",
    ),
]
SqsOption = Annotated[
    str | None,
    typer.Option(
        "--sqs",
        metavar="HOST:PORT",
        help="Listener for programs written for Amazon SQS, for example 127.0.0.1:9324. [default: off]",
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        envvar="MANSIO_CONFIG",
        metavar="FILE",
        help="Settings as YAML or TOML; see config.example.yaml.",
    ),
]
NodeIdOption = Annotated[
    int | None,
    typer.Option("--node-id", metavar="N", help="Id of this broker in its cluster. [default: 1]"),
]
EtcdOption = Annotated[
    str | None,
    typer.Option(
        "--etcd", metavar="URLS", help="Join the cluster of this etcd: http://HOST:PORT, separated by commas."
    ),
]
JoinOption = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="HOSTS",
        help="Join a cluster whose brokers run etcd members, on these hosts, separated by commas.",
    ),
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        metavar="LISTENERS",
        help="Address for clients and other brokers, in the form of --kafka. [default: the listeners]",
    ),
]
RackOption = Annotated[
    str | None,
    typer.Option(
        "--rack",
        metavar="NAME",
        help="Rack of this broker; replicas of a partition are placed on different racks.",
    ),
]
DevOption = Annotated[
    bool,
    typer.Option(
        "--dev",
        help="For development, not for production: a topic is created when a client first asks for it "
        "(auto_create_topics_enable=true), and a consumer group starts without waiting for further members "
        "(group_initial_rebalance_delay_ms=0). --set has precedence.",
    ),
]
SecureOption = Annotated[
    bool,
    typer.Option(
        "--secure",
        help="Serve the Kafka protocol with TLS, to users who log in: make an authority, a certificate and the user "
        "admin in DATA/security at the first start, and print how to connect; needs the extra secure.",
    ),
]
PROCESSES_MAX = 64
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        max=PROCESSES_MAX,
        metavar="N",
        help="Run N brokers on this machine, each a process with a node id and a Kafka port of its own, from --node-id "
        "and --kafka on; with etcd, which is started here unless --etcd or --join names one. Linux only.",
    ),
]
SupervisedOption = Annotated[
    bool, typer.Option("--supervised", hidden=True, help="The standard input is the channel of --processes.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any setting by its name; repeatable."),
]


@dataclass(frozen=True, slots=True)
class GivenFlags:
    """Flags with which `mansio serve` was started. `named`: settings that have a flag; None: not given."""

    named: Mapping[str, Any]
    config: str | None
    set_: Sequence[str]
    is_dev: bool
    is_secure: bool

    def settings(self, changes: Mapping[str, str]) -> Settings:
        """Return the settings of a broker with these flags and some changed settings. Raises as
        `settings_from_flags`."""
        return settings_from_flags(
            {**self.named, **changes},
            self.config,
            self._kept(changes),
            dev=self.is_dev,
            secure=self.is_secure,
        )

    def arguments(self, changes: Mapping[str, str]) -> list[str]:
        """Return the arguments of `mansio` for such a broker."""
        arguments = ["serve"]
        if self.config is not None:
            arguments += ["--config", self.config]
        for each in self._kept(changes):
            arguments += ["--set", each]
        for name, value in {**self.named, **changes}.items():
            if value is not None:
                flag = SETTING_FLAGS.get(name)
                arguments += ["--set", f"{name}={value}"] if flag is None else [flag, str(value)]
        if self.is_dev:
            arguments.append("--dev")
        return arguments

    def _kept(self, changes: Mapping[str, str]) -> list[str]:
        """Return the values of --set that no change replaces, also under Kafka's name."""
        from mansio.config.settings import SPECIFICATIONS

        replaced = {*changes, *(SPECIFICATIONS[name].kafka_name for name in changes)}
        return [
            each
            for each in self.set_
            if not replaced.intersection((name := each.partition("=")[0].strip(), name.replace(".", "_")))
        ]


def settings_from_flags(
    named: Mapping[str, Any],
    config: str | None,
    set_: list[str] | None,
    *,
    dev: bool = False,
    secure: bool = False,
) -> Settings:
    """Load the settings of a broker from flags, environment and file. `named`: settings that have a flag; None: not
    given. `dev`: use `DEV_SETTINGS`, unless `set_` has other values. `secure`: change them as a protected start
    does.

    An invalid flag is a usage error (exit code 2); other invalid settings raise `ConfigError`.
    """
    from mansio.config.settings import DEV_SETTINGS, Origin
    from mansio.config.sources import load_settings

    flags: dict[str, Any] = dict(parse_name_values(set_ or (), "--set"))
    if dev:
        set_names = {name.replace(".", "_") for name in flags}
        flags.update({name: value for name, value in DEV_SETTINGS.items() if name not in set_names})
    flags.update({name: value for name, value in named.items() if value is not None})
    try:
        return load_settings(config, flags, is_protected=secure)
    except ConfigError as error:
        message = error.message.removesuffix(f" (from the {Origin.FLAG})")
        if message != error.message:
            name = message.partition(":")[0]
            usage_error(message, "--set" if named.get(name) is None else SETTING_FLAGS[name])
        raise
