"""Options of the commands that decode keys and values.

Invariants:
* Importing this module imports only typer and the standard library.
* Schemas are checked before Spark starts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable


class ValueFormat(StrEnum):
    """Format of keys or values."""

    JSON = "json"
    AVRO = "avro"
    PROTOBUF = "protobuf"


ValueFormatOption = Annotated[
    ValueFormat | None,
    typer.Option(
        "--value-format",
        help="Decode values into the column decoded_value; requires --value-schema or --schema-registry.",
    ),
]
ValueSchemaOption = Annotated[
    str | None,
    typer.Option(
        "--value-schema",
        metavar="FILE",
        help="Schema of the values: Avro or JSON Schema, or a Protobuf descriptor set (protoc --include_imports"
        " --descriptor_set_out). With a registry, the schema to read them as. [default: all versions of the subject]",
    ),
]
ValueMessageOption = Annotated[
    str | None,
    typer.Option(
        "--value-message",
        metavar="NAME",
        help="Protobuf message of the values. [default: the only one, or the first of the registered file]",
    ),
]
KeyFormatOption = Annotated[
    ValueFormat | None,
    typer.Option(
        "--key-format",
        help="Decode keys into the column decoded_key; as --value-format for the options --key-...",
    ),
]
KeySchemaOption = Annotated[
    str | None, typer.Option("--key-schema", metavar="FILE", help="Schema of the keys, as --value-schema.")
]
KeyMessageOption = Annotated[
    str | None, typer.Option("--key-message", metavar="NAME", help="Protobuf message of the keys.")
]
SchemaRegistryOption = Annotated[
    str | None,
    typer.Option(
        "--schema-registry",
        metavar="URL",
        help="Confluent schema registry: keys and values begin with a schema id; subjects are TOPIC-key and"
        " TOPIC-value. Credentials: MANSIO_SCHEMA_REGISTRY_USER, MANSIO_SCHEMA_REGISTRY_PASSWORD.",
    ),
]


def decoding_options(
    topics: Iterable[str],
    *,
    value_format: ValueFormat | None,
    value_schema: str | None,
    value_message: str | None,
    key_format: ValueFormat | None,
    key_schema: str | None,
    key_message: str | None,
    schema_registry: str | None,
) -> dict[str, str]:
    """Return the options of `format("mansio")` for these options of a command. The schemas of the topics are read, so
    that an invalid one is an error before Spark starts.

    Raises `ConfigError`, `MissingExtra`, `SchemaRegistryError`.
    """
    found = {} if schema_registry is None else {"schemaRegistry": schema_registry}
    for side, kind, file, message in (
        ("value", value_format, value_schema, value_message),
        ("key", key_format, key_schema, key_message),
    ):
        if kind is not None:
            found[f"{side}Format"] = kind.value
        if message is not None:
            found[f"{side}Message"] = message
        if file is not None:
            found[f"{side}Schema"] = _read_schema(file, kind)
    if found:
        _check(topics, found)
    return found


def _read_schema(path: str, kind: ValueFormat | None) -> str:
    from mansio.errors import ConfigError
    from mansio.schemas.formats import encode_schema_file

    try:
        with open(path, "rb") as file:
            return encode_schema_file("" if kind is None else kind.value, file.read())
    except OSError as error:
        raise ConfigError(f"the schema {path} cannot be read: {error}") from error


def _check(topics: Iterable[str], options: dict[str, str]) -> None:
    from mansio.schemas.formats import open_decoder
    from mansio.spark.options import decoded_columns

    for topic in topics:
        for column in decoded_columns({**options, "subscribe": topic}):
            open_decoder(column.format)
