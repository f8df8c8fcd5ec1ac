"""`mansio quota`: list, set, delete quotas: rates of clients, and rates of new connections of addresses.

Invariants:
* All commands select the entity of a quota with the same options: `--client ID` or `--default-client`, `--user NAME` or
  `--default-user`, or one of each pair; or `--ip ADDRESS` or `--default-ip`. A default applies to all clients, users or
  addresses without a quota of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    connect,
    run,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, show_rows

if TYPE_CHECKING:
    from mansio.client.admin.quotas import DefaultEntity, Quota

app = typer.Typer(
    no_args_is_help=True, help="Limit the rates at which clients write, read, change topics, and connect."
)

ClientOption = Annotated[
    str | None, typer.Option("--client", "-c", metavar="ID", help="Clients with this client id.")
]
DefaultClientOption = Annotated[
    bool,
    typer.Option("--default-client", help="Every client id without a quota of its own, individually."),
]
UserOption = Annotated[
    str | None,
    typer.Option("--user", metavar="NAME", help="A user; a client that has not authenticated is ANONYMOUS."),
]
DefaultUserOption = Annotated[
    bool, typer.Option("--default-user", help="Every user without a quota of their own, individually.")
]
IpOption = Annotated[
    str | None,
    typer.Option("--ip", metavar="ADDRESS", help="An address; of an IPv6 address, its first 64 bits count."),
]
DefaultIpOption = Annotated[
    bool, typer.Option("--default-ip", help="Every address without a quota of its own, individually.")
]

PRODUCER_BYTE_RATE = "producer_byte_rate"
CONSUMER_BYTE_RATE = "consumer_byte_rate"
CONTROLLER_MUTATION_RATE = "controller_mutation_rate"
CONNECTION_CREATION_RATE = "connection_creation_rate"
QUOTA_COLUMNS = (
    "user",
    "client",
    "ip",
    PRODUCER_BYTE_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    CONNECTION_CREATION_RATE,
)
MUTATION_RATE_MIN = 0.001


@app.callback()
def command_group() -> None:
    """Limit the rates at which clients write, read, change topics, and connect."""


@app.command("list")
def list_quotas(
    output: OutputOption = Output.TABLE, bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS
) -> None:
    """List the quotas, in bytes, partitions or new connections per second.

    A default user, client or address is "(default)" in the table, and `default_user`, `default_client` or `default_ip`
    in JSON.
    """

    async def work() -> list[Quota]:
        async with connect(bootstrap_servers) as client:
            return await client.admin.quotas.list()

    quotas = run(work())
    rows = [_row(quota, names_only=output is Output.JSON) for quota in quotas]
    show_rows(output, rows, QUOTA_COLUMNS, empty="no quotas")


def _row(quota: Quota, *, names_only: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "user": _entity_name(quota.user, names_only=names_only),
        "client": _entity_name(quota.client_id, names_only=names_only),
        "ip": _entity_name(quota.ip, names_only=names_only),
        PRODUCER_BYTE_RATE: _rate(quota.values.get(PRODUCER_BYTE_RATE)),
        CONSUMER_BYTE_RATE: _rate(quota.values.get(CONSUMER_BYTE_RATE)),
        CONTROLLER_MUTATION_RATE: quota.values.get(CONTROLLER_MUTATION_RATE),
        CONNECTION_CREATION_RATE: _rate(quota.values.get(CONNECTION_CREATION_RATE)),
    }
    if names_only:
        row |= {
            "default_user": not isinstance(quota.user, str | None),
            "default_client": not isinstance(quota.client_id, str | None),
            "default_ip": not isinstance(quota.ip, str | None),
        }
    return row


def _entity_name(name: str | DefaultEntity | None, *, names_only: bool) -> str | None:
    if name is None or isinstance(name, str):
        return name
    return None if names_only else "(default)"


def _rate(value: float | None) -> int | None:
    return None if value is None else int(value)


@app.command("set")
def set_quota(
    client: ClientOption = None,
    default_client: DefaultClientOption = False,
    user: UserOption = None,
    default_user: DefaultUserOption = False,
    ip: IpOption = None,
    default_ip: DefaultIpOption = False,
    producer_byte_rate: Annotated[
        int | None,
        typer.Option(
            "--producer-byte-rate",
            "-w",
            min=1,
            metavar="BYTES",
            help="Bytes that it may write per second.",
        ),
    ] = None,
    consumer_byte_rate: Annotated[
        int | None,
        typer.Option(
            "--consumer-byte-rate",
            "-r",
            min=1,
            metavar="BYTES",
            help="Bytes that it may read per second.",
        ),
    ] = None,
    controller_mutation_rate: Annotated[
        float | None,
        typer.Option(
            "--controller-mutation-rate",
            min=MUTATION_RATE_MIN,
            metavar="PARTITIONS",
            help="Partitions that it may create and delete per second.",
        ),
    ] = None,
    connection_creation_rate: Annotated[
        int | None,
        typer.Option(
            "--connection-creation-rate",
            min=1,
            metavar="CONNECTIONS",
            help="Connections that an address may create per second.",
        ),
    ] = None,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Set quotas; other quotas are not changed."""
    entity = _entity(
        client, user, ip, default_client=default_client, default_user=default_user, default_ip=default_ip
    )
    given = {
        PRODUCER_BYTE_RATE: producer_byte_rate,
        CONSUMER_BYTE_RATE: consumer_byte_rate,
        CONTROLLER_MUTATION_RATE: controller_mutation_rate,
        CONNECTION_CREATION_RATE: connection_creation_rate,
    }
    values = {name: value for name, value in given.items() if value is not None}
    if not values:
        usage_error(
            "give --producer-byte-rate, --consumer-byte-rate or --controller-mutation-rate; "
            "of an address --connection-creation-rate",
            "set",
        )

    async def work() -> None:
        async with connect(bootstrap_servers) as connected:
            await connected.admin.quotas.set(**entity, values=values)

    run(work())


@app.command()
def delete(
    client: ClientOption = None,
    default_client: DefaultClientOption = False,
    user: UserOption = None,
    default_user: DefaultUserOption = False,
    ip: IpOption = None,
    default_ip: DefaultIpOption = False,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete all quotas of a client, a user, an address, or a default."""
    entity = _entity(
        client, user, ip, default_client=default_client, default_user=default_user, default_ip=default_ip
    )

    async def work() -> None:
        async with connect(bootstrap_servers) as connected:
            await connected.admin.quotas.delete(**entity)

    run(work())


def _entity(
    client: str | None,
    user: str | None,
    ip: str | None,
    *,
    default_client: bool,
    default_user: bool,
    default_ip: bool,
) -> dict[str, Any]:
    from mansio.client.admin.quotas import DEFAULT_ENTITY

    if client is not None and default_client:
        usage_error("give either --client or --default-client", "--default-client")
    if user is not None and default_user:
        usage_error("give either --user or --default-user", "--default-user")
    if ip is not None and default_ip:
        usage_error("give either --ip or --default-ip", "--default-ip")
    entity = {
        "client_id": DEFAULT_ENTITY if default_client else client,
        "user": DEFAULT_ENTITY if default_user else user,
        "ip": DEFAULT_ENTITY if default_ip else ip,
    }
    if all(name is None for name in entity.values()):
        usage_error(
            "give --client, --default-client, --user, --default-user, --ip or --default-ip", "--client"
        )
    return entity
