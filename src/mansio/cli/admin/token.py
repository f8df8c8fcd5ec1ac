"""`mansio token`: create, list, renew and delete delegation tokens.

Invariant: the secret of a token is no argument of a command, because other users of the machine can see those. Commands
name a token by its id, and get its secret from the broker.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    connect,
    parse_duration_s,
    run,
    run_for_each,
)
from mansio.cli.support.formatting import Output, OutputOption, show_rows
from mansio.errors import DelegationTokenNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.client.admin.tokens import TokenAdmin
    from mansio.net.delegation_tokens import DelegationToken

app = typer.Typer(no_args_is_help=True, help="Delegation tokens, with which programs act for a user.")

TokenArgument = Annotated[str, typer.Argument(metavar="TOKEN_ID", help="Id of the token.")]


@app.callback()
def command_group() -> None:
    """Tokens with which programs act for a user."""


@app.command()
def create(
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="USER", help="Another user than that of the command.")
    ] = None,
    renewers: Annotated[
        list[str] | None,
        typer.Option("--renewer", metavar="USER", help="Who may renew the token, too; repeatable."),
    ] = None,
    max_lifetime: Annotated[
        str | None,
        typer.Option(
            "--max-lifetime",
            metavar="DURATION",
            help="Time after which the token ends, such as 8h. Default: that of the brokers.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Create a token, and show its id and its password, with which a program logs in."""
    lifetime = _period(max_lifetime, "--max-lifetime")

    async def work() -> DelegationToken:
        async with connect(bootstrap_servers) as client:
            return await client.admin.tokens.create(
                owner=owner, renewers=renewers or (), max_lifetime=lifetime
            )

    created = run(work())
    row = {"token_id": created.token_id, "password": created.password, "expires": _time(created)}
    show_rows(output, [row], ("token_id", "password", "expires"), empty="")


@app.command("list")
def list_tokens(
    owner: Annotated[
        str | None, typer.Argument(metavar="[USER]", help="Only tokens that this user may renew.")
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List the tokens that the user may see, without their secrets."""

    async def work() -> Sequence[DelegationToken]:
        async with connect(bootstrap_servers) as client:
            return await client.admin.tokens.list(owner)

    rows = [
        {
            "token_id": token.token_id,
            "owner": token.owner,
            "renewers": ",".join(token.renewers),
            "expires": _time(token),
            "ends": token.ends.isoformat(timespec="seconds"),
        }
        for token in run(work())
    ]
    show_rows(output, rows, ("token_id", "owner", "renewers", "expires", "ends"), empty="no tokens")


@app.command()
def renew(
    token_id: TokenArgument,
    period: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="DURATION",
            help="Time from now until the token ends. Default: that of the brokers.",
        ),
    ] = None,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Let a token end later."""
    wanted = _period(period, "--for")

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            tokens = client.admin.tokens
            await tokens.renew(await _secret(tokens, token_id), period=wanted)

    run(work())


@app.command()
def delete(
    token_ids: Annotated[list[str], typer.Argument(metavar="TOKEN_ID...", help="Ids of tokens.")],
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete tokens; their sessions end."""

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            tokens = client.admin.tokens

            async def delete_one(token_id: str) -> None:
                await tokens.expire(await _secret(tokens, token_id))

            await run_for_each(token_ids, delete_one)

    run(work())


async def _secret(tokens: TokenAdmin, token_id: str) -> bytes:
    for token in await tokens.list():
        if token.token_id == token_id:
            return token.hmac
    raise DelegationTokenNotFound(f"there is no token {token_id!r} that you may see")


def _period(text: str | None, option: str) -> timedelta | None:
    return None if text is None else timedelta(seconds=parse_duration_s(text, option))


def _time(token: DelegationToken) -> str:
    return token.expires.isoformat(timespec="seconds")
