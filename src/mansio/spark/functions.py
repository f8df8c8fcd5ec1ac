"""Column functions that decode and encode Avro, Protobuf and JSON, without jars.

>>> from mansio.spark.functions import from_avro
>>> flights.select(from_avro("value", subject="flights-value", schemaRegistryAddress="http://127.0.0.1:8081"))

Parameters have the names of `pyspark.sql.avro.functions`, `pyspark.sql.protobuf.functions` and of Databricks, so that a
query can change between them by its import. The functions are Arrow UDFs (Spark 4.1 or newer); Mansio must be installed
for the Python workers of Spark. `mansio.schemas` documents the types of the columns.

A malformed value ends the query (`mode` FAILFAST, the default), or becomes null (`mode` PERMISSIVE).

Credentials of a schema registry come from the environment variables `MANSIO_SCHEMA_REGISTRY_USER` and
`MANSIO_SCHEMA_REGISTRY_PASSWORD` of the driver, or from the option
`confluent.schema.registry.basic.auth.user.info` (`user:password`). They are sent to tasks inside the function, and do
not appear in plans.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mansio.errors import ConfigError
from mansio.host.extras import require_extra

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from pyspark.sql import Column

    from mansio.schemas.formats import ColumnFormat
    from mansio.serde.http_registry import RegistryCredentials, SchemaRegistry

__all__ = ["from_avro", "from_json_schema", "from_protobuf", "to_avro"]

MODE_OPTION: Final = "mode"
READER_SCHEMA_OPTION: Final = "avroschema"
USER_INFO_OPTION: Final = "confluent.schema.registry.basic.auth.user.info"
CREDENTIALS_SOURCE_OPTION: Final = "confluent.schema.registry.basic.auth.credentials.source"
FAILFAST: Final = "FAILFAST"
PERMISSIVE: Final = "PERMISSIVE"


def from_avro(
    data: Column | str,
    jsonFormatSchema: str | None = None,
    options: dict[str, str] | None = None,
    subject: str | None = None,
    schemaRegistryAddress: str | None = None,
) -> Column:
    """Decode a binary column of Avro values.

    `jsonFormatSchema`: the schema. Without a registry it is the schema with which the values were written, and the
    option `avroSchema` may give another one to read them as. With `schemaRegistryAddress` the values are in Confluent's
    wire format, which names the writer's schema; they are read as `avroSchema`, `jsonFormatSchema` or, by default, the
    latest version of `subject` at the time of this call. `options`: `mode`, `avroSchema`.

    Raises `ConfigError` (`UnsupportedSchema`, for example for a schema that contains itself), `SchemaRegistryError` and
    `MissingExtra`.
    """
    chosen = _Options(options, (READER_SCHEMA_OPTION,))
    reader = chosen.text(READER_SCHEMA_OPTION) or jsonFormatSchema or ""
    if schemaRegistryAddress is None:
        written = (jsonFormatSchema or "") if chosen.text(READER_SCHEMA_OPTION) else ""
        return _decode(data, chosen, "avro", schema=reader, writer_schema=written)
    references: tuple[str, ...] = ()
    if not reader:
        reader, references = _latest(schemaRegistryAddress, subject, chosen, "avro")
    return _decode(
        data,
        chosen,
        "avro",
        schema=reader,
        references=references,
        registry=schemaRegistryAddress,
        subject=subject or "",
    )


def to_avro(
    data: Column | str,
    jsonFormatSchema: str = "",
    options: dict[str, str] | None = None,
    subject: str | None = None,
    schemaRegistryAddress: str | None = None,
) -> Column:
    """Encode a column as Avro, each value by itself.

    `jsonFormatSchema`: the schema; by default it is derived from the column, with nullable fields, as in Spark. With
    `schemaRegistryAddress` the values are in Confluent's wire format: with the latest version of `subject`, or with
    `jsonFormatSchema`, which is registered as a version of `subject` if it is not one yet. A value that does not match
    the schema ends the query.

    Raises `ConfigError` (`UnsupportedSchema`), `SchemaRegistryError` (also if the registry refuses the schema as
    incompatible) and `MissingExtra`.
    """
    from mansio.schemas.formats import AVRO_FORMAT, latest_reader_schema
    from mansio.serde.frames import schema_key_bytes

    require_extra("avro")
    chosen = _Options(options, ())
    header, text = b"", jsonFormatSchema
    references: tuple[str, ...] = ()
    if schemaRegistryAddress is not None:
        registry, subject = _registry(schemaRegistryAddress, chosen), _required_subject(subject)
        if jsonFormatSchema:
            header = schema_key_bytes(registry.register(subject, jsonFormatSchema))
        else:
            header = schema_key_bytes(registry.latest_version(subject).schema_id)
            text, references = latest_reader_schema(registry, subject, AVRO_FORMAT)
    if text:
        _avro_schema(text, references)  # an invalid schema is an error here, not in a task

    def encode(arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
        from mansio.spark.functions import encode_array

        for array in arrays:
            yield encode_array(array, text, references, header)

    return _arrow_udf(encode, "binary", "to_avro")(data)


def from_protobuf(
    data: Column | str,
    messageName: str | None = None,
    descFilePath: str | None = None,
    options: dict[str, str] | None = None,
    binaryDescriptorSet: bytes | None = None,
    subject: str | None = None,
    schemaRegistryAddress: str | None = None,
) -> Column:
    """Decode a binary column of Protobuf messages.

    The message type is in a `FileDescriptorSet` (`protoc --include_imports --descriptor_set_out=FILE`), given as
    `descFilePath` or `binaryDescriptorSet`, or, with `schemaRegistryAddress`, in the latest version of `subject` at the
    time of this call. `messageName`: its full name; by default the only message of the last file, or the first message
    of the registered file. With a registry the values are in Confluent's wire format. `options`: `mode`.

    Raises `ConfigError` (`UnsupportedSchema`), `SchemaRegistryError`, `MissingExtra`, and `OSError` for the file.
    """
    chosen = _Options(options, ())
    content = binaryDescriptorSet
    if descFilePath is not None:
        with open(descFilePath, "rb") as file:
            content = file.read()
    if content is not None:
        schema = base64.b64encode(content).decode()
    elif schemaRegistryAddress is not None:
        schema, _ = _latest(schemaRegistryAddress, subject, chosen, "protobuf")
    else:
        raise ConfigError(
            "from_protobuf needs descFilePath, binaryDescriptorSet, or subject and schemaRegistryAddress"
        )
    return _decode(
        data,
        chosen,
        "protobuf",
        schema=schema,
        message=messageName or "",
        registry=schemaRegistryAddress or "",
        subject=subject or "",
    )


def from_json_schema(
    data: Column | str,
    jsonSchema: str | None = None,
    options: dict[str, str] | None = None,
    subject: str | None = None,
    schemaRegistryAddress: str | None = None,
) -> Column:
    """Decode a string or binary column of JSON values to the columns of a JSON Schema.

    `jsonSchema`: the schema, by default the latest version of `subject` at the time of this call. With
    `schemaRegistryAddress` the values are in Confluent's wire format. A value of another type than the schema's, or
    without a required property, is malformed. `options`: `mode`.

    Raises `ConfigError` (`UnsupportedSchema`), `SchemaRegistryError`.
    """
    chosen = _Options(options, ())
    schema = jsonSchema or ""
    if not schema and schemaRegistryAddress is not None:
        schema, _ = _latest(schemaRegistryAddress, subject, chosen, "json")
    return _decode(
        data, chosen, "json", schema=schema, registry=schemaRegistryAddress or "", subject=subject or ""
    )


class _Options:
    """The options of a function by lower-case name; unknown names are refused."""

    def __init__(self, options: dict[str, str] | None, names: tuple[str, ...]) -> None:
        known = (MODE_OPTION, USER_INFO_OPTION, CREDENTIALS_SOURCE_OPTION, *names)
        self._texts = {name.lower(): text for name, text in (options or {}).items()}
        for name in self._texts:
            if name not in known:
                raise ConfigError(f"there is no option {name!r}: {', '.join(known)}")
        source = self._texts.get(CREDENTIALS_SOURCE_OPTION, "USER_INFO")
        if source.upper() != "USER_INFO":
            raise ConfigError(f"option {CREDENTIALS_SOURCE_OPTION} must be USER_INFO")

    def text(self, name: str) -> str:
        return self._texts.get(name, "")

    def is_permissive(self) -> bool:
        mode = self._texts.get(MODE_OPTION, FAILFAST).upper()
        if mode not in (FAILFAST, PERMISSIVE):
            raise ConfigError(f"option mode must be {FAILFAST} or {PERMISSIVE}")
        return mode == PERMISSIVE

    def credentials(self) -> RegistryCredentials | None:
        from mansio.serde.http_registry import RegistryCredentials

        user_info = self._texts.get(USER_INFO_OPTION)
        if user_info is None:
            return RegistryCredentials.from_environment()
        user, separator, password = user_info.partition(":")
        if not separator:
            raise ConfigError(f"option {USER_INFO_OPTION} must be user:password")
        return RegistryCredentials(user, password)


def _required_subject(subject: str | None) -> str:
    if not subject:
        raise ConfigError("a schema registry needs the name of a subject, such as TOPIC-value")
    return subject


def _registry(address: str, options: _Options) -> SchemaRegistry:
    from mansio.serde.http_registry import SchemaRegistry

    return SchemaRegistry(address, options.credentials())


def _latest(address: str, subject: str | None, options: _Options, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the latest version of a subject: text and references."""
    from mansio.schemas.formats import latest_reader_schema

    if name in ("avro", "protobuf"):
        require_extra(name)
    return latest_reader_schema(_registry(address, options), _required_subject(subject), name)


def _decode(data: Column | str, options: _Options, name: str, **format_fields: Any) -> Column:
    """Return the column that decodes `data`. The schema is checked here; tasks get the description of the format."""
    from mansio.schemas.column_types import spark_type
    from mansio.schemas.formats import ColumnFormat, open_decoder

    credentials = options.credentials() if format_fields.get("registry") else None
    column = ColumnFormat(name, credentials=credentials, **format_fields)
    is_permissive = options.is_permissive()
    kind = spark_type(open_decoder(column).type)

    def decode(arrays: Iterator[pa.Array]) -> Iterator[pa.Array]:
        from mansio.spark.functions import decode_array

        for array in arrays:
            yield decode_array(array, column, is_permissive)

    return _arrow_udf(decode, kind, f"from_{'json_schema' if name == 'json' else name}")(data)


def _arrow_udf(function: Any, kind: str, name: str) -> Callable[[Column | str], Column]:
    """Return an Arrow UDF over iterators of arrays. Spark reads its type from annotations, which must be the types
    themselves.
    """
    require_extra("spark")
    import pyarrow as pa
    from pyspark.sql.pandas import functions as spark_functions

    function.__name__ = name
    function.__annotations__ = {"arrays": Iterator[pa.Array], "return": Iterator[pa.Array]}
    arrow_udf: Any = spark_functions.arrow_udf  # its overloads know the type only as an argument
    found: Callable[[Column | str], Column] = arrow_udf(function, kind)
    return found


def decode_array(array: pa.Array, column: ColumnFormat, is_permissive: bool) -> pa.Array:
    """Decode a column in a task. Raises `MalformedValue` unless `is_permissive`."""
    from mansio.schemas.formats import cached_decoder
    from mansio.serde.errors import MalformedValue

    values = [one.encode() if isinstance(one, str) else one for one in array.to_pylist()]
    found = cached_decoder(column).decode(values)
    if found.errors and not is_permissive:
        raise MalformedValue(
            f"{next(iter(found.errors.values()))}. Option mode PERMISSIVE returns null for malformed values"
        )
    return found.array


def encode_array(array: pa.Array, text: str, references: tuple[str, ...], header: bytes) -> pa.Array:
    """Encode a column in a task. `text`: the Avro schema; empty: it is derived from the type of the column. Raises
    `MalformedValue`.
    """
    import pyarrow as pa

    from mansio.schemas.avro import schema_of_type

    encode = _avro_schema(text or schema_of_type(array.type), references).encode
    values = [None if one is None else header + encode(one) for one in array.to_pylist()]
    return pa.array(values, pa.binary())


@lru_cache(maxsize=32)
def _avro_schema(text: str, references: tuple[str, ...]) -> Any:
    from mansio.schemas.avro import AvroSchema

    return AvroSchema(text, references)
