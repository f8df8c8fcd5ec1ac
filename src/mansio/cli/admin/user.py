"""`mansio user`: create, list, delete users, set their passwords, and administer their API keys and access keys of SQS.

Invariant: a password is no argument of a command, because other users of the machine can see those. It comes from a
prompt on a terminal, from a file, or from standard input.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    YesOption,
    confirm,
    connect,
    parse_duration_s,
    run,
    run_for_each,
    usage_error,
)
from mansio.cli.support.formatting import Output, OutputOption, count_text, show_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.client import Client
    from mansio.client.admin.users import SqsAccessKey, User, UserApiKey

app = typer.Typer(no_args_is_help=True, help="Users that authenticate with a password.")

sqs_key_app = typer.Typer(no_args_is_help=True, help="Access keys of users for the SQS endpoint.")
app.add_typer(sqs_key_app, name="sqs-key")

STANDARD_INPUT: Final = "-"
PASSWORD_FILE_BYTES_MAX: Final = 4_096


class Mechanism(StrEnum):
    """Mechanisms of SCRAM."""

    SHA_256 = "SCRAM-SHA-256"
    SHA_512 = "SCRAM-SHA-512"


UserArgument = Annotated[str, typer.Argument(metavar="USER", help="Name of the user.")]
PasswordFileOption = Annotated[
    str | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        help="File whose first line is the password; - for standard input. Without it, a terminal asks.",
    ),
]


@app.callback()
def command_group() -> None:
    """Users that authenticate with a password."""


@app.command()
def create(
    user: UserArgument,
    password_file: PasswordFileOption = None,
    mechanism: Annotated[
        list[Mechanism] | None,
        typer.Option("--mechanism", "-m", help="Only this mechanism; repeatable. Default: both."),
    ] = None,
    iterations: Annotated[
        int,
        typer.Option("--iterations", min=4_096, max=16_384, help="Rounds of the hash function."),
    ] = 4_096,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Create a user."""
    password = read_password(password_file)

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            await client.admin.users.create(
                user, password, mechanisms=mechanism or list(Mechanism), iterations=iterations
            )

    run(work())


@app.command("list")
def list_users(
    output: OutputOption = Output.TABLE, bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS
) -> None:
    """List the users, with the rounds of each mechanism."""

    async def work() -> list[User]:
        async with connect(bootstrap_servers) as client:
            return await client.admin.users.list()

    rows = [
        {"user": user.name, **{each.value: user.iterations.get(each.value) for each in Mechanism}}
        for user in run(work())
    ]
    show_rows(output, rows, ("user", *map(str, Mechanism)), empty="no users")


@app.command()
def delete(
    users: Annotated[list[str], typer.Argument(metavar="USER...", help="Names of users.")],
    with_acls: Annotated[
        bool, typer.Option("--with-acls", help="Remove the ACLs of each user, too, after the user.")
    ] = False,
    yes: YesOption = False,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete users; their sessions end.

    Without --with-acls their ACLs stay, and a later user of the same name has them; their number is printed. Asks for
    confirmation before it deletes the user as which it is logged in, or a super user.
    """
    from mansio.net.contexts import resolve_security

    own = resolve_security(bootstrap_servers).user

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            risky = []
            for user in users:
                kinds = []
                if user == own:
                    kinds.append("your own user")
                if await _is_super_user(client, user):
                    kinds.append("a super user")
                if kinds:
                    risky.append(f"{user} ({', '.join(kinds)})")
            if risky:
                confirm(f"{', '.join(risky)} will be deleted", is_sure=yes)
            await run_for_each(users, lambda user: _delete(client, user, with_acls=with_acls))

    run(work())


async def _is_super_user(client: Client, user: str) -> bool:
    """Whether the brokers' setting `super_users` has a user; false if they cannot tell."""
    from mansio.errors import UnsupportedVersion
    from mansio.state.authorization.acls import CLUSTER_NAME, Operation, ResourceType

    query = Operation.ALTER, ResourceType.CLUSTER, CLUSTER_NAME
    try:
        (decision,) = await client.admin.acls.check([query], user=user)
    except UnsupportedVersion:  # it is not Mansio
        return False
    return decision.is_super_user


async def _delete(client: Client, user: str, *, with_acls: bool) -> None:
    """Delete a user; then remove its ACLs, or print that it has some."""
    from shlex import quote

    from mansio.errors import MansioError, SecurityDisabled
    from mansio.state.authorization.acls import AclFilter

    principal = f"User:{user}"
    of_user = AclFilter(principal=principal)
    try:
        count = len(await client.admin.acls.list(of_user))
    except SecurityDisabled:  # there is no authorizer
        count = 0
    await client.admin.users.delete(user)
    if not count:
        return
    left = (
        f"mansio: the ACLs of {user} stay ({count:,}), and a later user of this name has them:"
        f" mansio acl remove {quote(principal)} --all"
    )
    if not with_acls:
        print(left, file=sys.stderr)
        return
    try:
        deleted = await client.admin.acls.delete([of_user])
    except MansioError:
        print(left, file=sys.stderr)
        raise
    print(f"mansio: {user}: {count_text(len(deleted), 'ACL')} removed", file=sys.stderr)


@app.command()
def set_password(
    user: UserArgument,
    password_file: PasswordFileOption = None,
    previous_valid: Annotated[
        str | None,
        typer.Option(
            "--previous-valid",
            metavar="DURATION",
            help="Time for which the present password stays valid, such as 1h. Default: it ends at once.",
        ),
    ] = None,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Change the password of a user."""
    valid_s = 0.0 if previous_valid is None else parse_duration_s(previous_valid, "--previous-valid")
    password = read_password(password_file)

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            await client.admin.users.set_password(user, password, previous_valid=timedelta(seconds=valid_s))

    run(work())


@sqs_key_app.callback()
def sqs_key_group() -> None:
    """Access keys of users for the SQS endpoint."""


@sqs_key_app.command("create")
def create_sqs_key(
    user: UserArgument,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Create an access key of a user, and show its secret, this once."""

    async def work() -> SqsAccessKey:
        async with connect(bootstrap_servers) as client:
            return await client.admin.users.create_sqs_key(user)

    created = run(work())
    row = {"access_key_id": created.key_id, "secret_access_key": created.secret}
    show_rows(output, [row], ("access_key_id", "secret_access_key"), empty="")


@sqs_key_app.command("list")
def list_sqs_keys(
    user: Annotated[str | None, typer.Argument(metavar="[USER]", help="Only the keys of this user.")] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List access keys, without their secrets."""

    async def work() -> Sequence[SqsAccessKey]:
        async with connect(bootstrap_servers) as client:
            return await client.admin.users.list_sqs_keys(user)

    rows = [
        {
            "user": key.user,
            "access_key_id": key.key_id,
            "created": None if key.created is None else key.created.isoformat(timespec="seconds"),
            "secrets_key": key.secrets_key_id,
        }
        for key in run(work())
    ]
    show_rows(output, rows, ("user", "access_key_id", "created", "secrets_key"), empty="no access keys")


@sqs_key_app.command("delete")
def delete_sqs_keys(
    key_ids: Annotated[list[str], typer.Argument(metavar="ACCESS_KEY_ID...", help="Ids of access keys.")],
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete access keys; requests that are signed with them are refused."""

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            await run_for_each(key_ids, client.admin.users.delete_sqs_key)

    run(work())


api_keys = typer.Typer(no_args_is_help=True, help="API keys, with which programs of a user log in.")
app.add_typer(api_keys, name="api-key")


@api_keys.command("create")
def create_api_key(
    user: UserArgument,
    description: Annotated[
        str, typer.Option("--description", metavar="TEXT", help="What the key is for.")
    ] = "",
    valid_for: Annotated[
        str | None,
        typer.Option(
            "--valid-for",
            metavar="DURATION",
            help="Time after which the key ends, such as 90d. Default: it does not.",
        ),
    ] = None,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Create an API key of a user, and print it: it cannot be shown again."""
    valid_s = None if valid_for is None else parse_duration_s(valid_for, "--valid-for")

    async def work() -> str:
        async with connect(bootstrap_servers) as client:
            valid = None if valid_s is None else timedelta(seconds=valid_s)
            created = await client.admin.users.create_api_key(user, description=description, valid_for=valid)
            return created.key

    typer.echo(run(work()))


@api_keys.command("list")
def list_api_keys(
    user: Annotated[
        str | None, typer.Argument(metavar="[USER]", help="Name of the user. Default: all users.")
    ] = None,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List API keys, without the keys themselves."""

    async def work() -> Sequence[UserApiKey]:
        async with connect(bootstrap_servers) as client:
            return await client.admin.users.list_api_keys(user)

    rows = [
        {
            "id": key.key_id,
            "user": key.user,
            "created": key.created.isoformat(timespec="seconds"),
            "expires": None if key.expires is None else key.expires.isoformat(timespec="seconds"),
            "description": key.description,
        }
        for key in run(work())
    ]
    show_rows(output, rows, ("id", "user", "created", "expires", "description"), empty="no API keys")


@api_keys.command("delete")
def delete_api_keys(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of API keys.")],
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete API keys; their sessions end."""

    async def work() -> None:
        async with connect(bootstrap_servers) as client:
            await run_for_each(ids, client.admin.users.delete_api_key)

    run(work())


def read_password(file: str | None) -> str:
    """Return the password of a file, of standard input or of a prompt: one line, without its end."""
    if file is None and sys.stdin is not None and sys.stdin.isatty():
        password: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        return password
    if file is None or file == STANDARD_INPUT:
        if sys.stdin is None:
            usage_error("there is no standard input", "--password-file")
        content = sys.stdin.buffer.readline(PASSWORD_FILE_BYTES_MAX)
    else:
        with Path(file).open("rb") as opened:
            content = opened.readline(PASSWORD_FILE_BYTES_MAX)
    try:
        return content.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError:
        usage_error("the password is not UTF-8", "--password-file")
