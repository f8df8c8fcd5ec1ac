"""`mansio schema`: register, list, show, check and delete schemas of the schema registry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    BootstrapServersOption,
    confirm,
    connect,
    run,
)
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_rows

if TYPE_CHECKING:
    from mansio.client.admin.schemas import RegisteredVersion, SchemaById
    from mansio.state.registry.schema import SchemaReference

app = typer.Typer(no_args_is_help=True, help="Schemas of keys and values, in the schema registry.")

_KINDS: Final = {".avsc": "AVRO", ".json": "JSON", ".proto": "PROTOBUF"}
INCOMPATIBLE_EXIT_CODE: Final = 1

SubjectArgument = Annotated[
    str, typer.Argument(metavar="SUBJECT", help="Name of the subject, such as orders-value.")
]
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="File with the schema.")
]
TypeOption = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="TYPE",
        help="AVRO, JSON or PROTOBUF; by default by the ending of the file: .avsc, .json, .proto.",
    ),
]
ReferenceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reference",
        metavar="NAME=SUBJECT:VERSION",
        help="A schema to which this one refers as NAME; repeatable.",
    ),
]
NormalizeOption = Annotated[
    bool, typer.Option("--normalize", help="Treat schemas that mean the same as the same schema.")
]
DeletedOption = Annotated[
    bool, typer.Option("--deleted", help="Include subjects and versions that are deleted but not removed.")
]


@app.callback()
def command_group() -> None:
    """Schemas of keys and values."""


@app.command()
def register(
    subject: SubjectArgument,
    file: FileArgument,
    kind: TypeOption = None,
    references: ReferenceOption = None,
    normalize: NormalizeOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Register a schema in a subject, and show its version and id.

    A subject that has the schema already keeps its version. A schema that is not compatible with the earlier versions
    is refused.
    """
    text, kind = _text(file), _kind(file, kind)
    named = [_reference(each) for each in references or ()]

    async def work() -> RegisteredVersion:
        async with connect(bootstrap_servers) as client:
            return await client.admin.schemas.register(
                subject, text, kind=kind, references=named, normalize=normalize
            )

    show_rows(output, [_row(run(work()))], ("subject", "version", "id", "guid", "type"), empty="")


@app.command("list")
def list_subjects(
    subject: Annotated[
        str | None, typer.Argument(metavar="[SUBJECT]", help="Show the versions of this subject.")
    ] = None,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="Only subjects that begin with this.")
    ] = "",
    deleted: DeletedOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """List the subjects, or the versions of one."""

    async def work() -> list[dict[str, Any]]:
        async with connect(bootstrap_servers) as client:
            schemas = client.admin.schemas
            if subject is None:
                return [{"subject": name} for name in await schemas.subjects(prefix, deleted=deleted)]
            numbers = await schemas.versions(subject, deleted=deleted)
            return [_row(await schemas.version(subject, number, deleted=deleted)) for number in numbers]

    columns = ("subject",) if subject is None else ("subject", "version", "id", "guid", "type", "deleted")
    show_rows(output, run(work()), columns, empty="no subjects")


@app.command()
def show(
    subject: Annotated[str | None, typer.Argument(metavar="[SUBJECT]", help="Name of the subject.")] = None,
    version: Annotated[
        str, typer.Argument(metavar="[VERSION]", help="Number of the version, or latest.")
    ] = "latest",
    schema_id: Annotated[
        int | None, typer.Option("--id", metavar="ID", min=1, help="The schema with this id.")
    ] = None,
    guid: Annotated[
        str | None, typer.Option("--guid", metavar="GUID", help="The schema with this GUID.")
    ] = None,
    deleted: DeletedOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show the schema of a version, or with an id or GUID, as it was registered."""
    if sum(each is not None for each in (subject, schema_id, guid)) != 1:
        raise typer.BadParameter("give a subject, --id or --guid")

    async def work() -> RegisteredVersion | SchemaById:
        async with connect(bootstrap_servers) as client:
            schemas = client.admin.schemas
            if schema_id is not None:
                return await schemas.by_id(schema_id)
            if guid is not None:
                return await schemas.by_guid(guid)
            assert subject is not None
            return await schemas.version(subject, version, deleted=deleted)

    found = run(work())
    if output is Output.TABLE:
        typer.echo(found.text)
    else:
        show_json({**_row(found), "schema": found.text})


@app.command()
def check(
    subject: SubjectArgument,
    file: FileArgument,
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            metavar="VERSION",
            help="Compare with this version, or latest; by default with those to which the level applies.",
        ),
    ] = None,
    kind: TypeOption = None,
    references: ReferenceOption = None,
    normalize: NormalizeOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Check whether a schema could be registered in a subject. The exit code is 1 if not."""
    text, kind = _text(file), _kind(file, kind)
    named = [_reference(each) for each in references or ()]

    async def work() -> tuple[bool, tuple[str, ...]]:
        async with connect(bootstrap_servers) as client:
            found = await client.admin.schemas.check(
                subject, text, kind=kind, references=named, version=version, normalize=normalize
            )
            return found.is_compatible, found.messages

    is_compatible, messages = run(work())
    if output is Output.TABLE:
        typer.echo("compatible" if is_compatible else "not compatible:")
        for each in messages:
            typer.echo(f"  {each}")
    else:
        show_json({"is_compatible": is_compatible, "messages": list(messages)})
    if not is_compatible:
        raise typer.Exit(INCOMPATIBLE_EXIT_CODE)


@app.command()
def delete(
    subject: SubjectArgument,
    version: Annotated[
        str | None,
        typer.Argument(metavar="[VERSION]", help="Only this version, or latest; by default all versions."),
    ] = None,
    permanent: Annotated[
        bool,
        typer.Option(
            "--permanent", help="Remove versions that are already deleted; their ids are then unknown."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Delete a version of a subject, or all. Schemas that are deleted are still found by their ids."""
    what = f"subject {subject}" if version is None else f"version {version} of subject {subject}"
    confirm(f"{what} will be {'removed' if permanent else 'deleted'}", is_sure=yes)

    async def work() -> list[int]:
        async with connect(bootstrap_servers) as client:
            return await client.admin.schemas.delete(subject, version, permanent=permanent)

    numbers = ", ".join(map(str, run(work())))
    typer.echo(f"{'removed' if permanent else 'deleted'} {subject} {numbers}")


@app.command()
def compatibility(
    subject: Annotated[
        str | None, typer.Argument(metavar="[SUBJECT]", help="Name of the subject; by default all subjects.")
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            "--set",
            metavar="LEVEL",
            help="NONE, or BACKWARD, FORWARD, FULL, each also with _TRANSITIVE; default: the general level.",
        ),
    ] = None,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Show or set the level of compatibility of a subject, or of all that have none of their own."""

    async def work() -> str:
        async with connect(bootstrap_servers) as client:
            schemas = client.admin.schemas
            if level is not None:
                await schemas.set_compatibility(None if level == "default" else level, subject)
            return await schemas.compatibility(subject)

    typer.echo(run(work()))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}") from None


def _kind(file: Path, kind: str | None) -> str:
    found = kind.upper() if kind is not None else _KINDS.get(file.suffix.lower(), "")
    if found not in _KINDS.values():
        raise typer.BadParameter(
            "give --type AVRO, JSON or PROTOBUF: the ending of the file does not tell it"
        )
    return found


def _reference(text: str) -> SchemaReference:
    from mansio.state.registry.schema import SchemaReference

    name, _, place = text.partition("=")
    subject, _, version = place.rpartition(":")
    if not name or not subject or not version.isdigit():
        raise typer.BadParameter(f"{text!r} is not NAME=SUBJECT:VERSION", param_hint="--reference")
    return SchemaReference(name, subject, int(version))


def _row(found: RegisteredVersion | SchemaById) -> dict[str, Any]:
    from mansio.client.admin.schemas import RegisteredVersion

    row: dict[str, Any] = {"id": found.schema_id, "guid": found.guid, "type": found.kind}
    if isinstance(found, RegisteredVersion):
        row = {"subject": found.subject, "version": found.version, **row, "deleted": found.is_deleted}
    if found.references:
        row["references"] = [each._asdict() for each in found.references]
    return row
