"""Formats of keys and values, and the decoders that make columns of them.

A value has one of three origins:

* without a registry: the value is the encoding of a known schema (`PlainDecoder`);
* with a registry and a reader schema: the value names its schema by id, and is read as the reader schema
  (`ReaderDecoder`; Avro schema resolution, defaults included);
* with a registry and a subject: the column type holds all versions of the subject, and a value is decoded with the
  version that it names (`SubjectDecoder`). A field that a version does not have is null.

Invariants:
* The column type of a subject is the merge of its versions in their order. A version that cannot be merged with those
  before it is rejected, and its values are malformed. So all processes accept the same versions, whenever they ask.
* A batch of values with unknown ids costs one request for the versions of the subject, however many ids it has.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from mansio.errors import ConfigError
from mansio.host.extras import require_extra
from mansio.schemas.column_types import check_readable, merge_types
from mansio.schemas.decoding import DecodedColumn, decode_objects, to_column
from mansio.schemas.json_schema import JsonSchema
from mansio.serde.definition import SchemaType
from mansio.serde.errors import MalformedValue, NotFramed, SchemaNotFound, UnsupportedSchema
from mansio.serde.frames import split_message_indexes, split_schema_key
from mansio.serde.http_registry import RegistryCredentials, SchemaRegistry

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from mansio.schemas.decoding import Decode
    from mansio.serde.frames import SchemaKey
    from mansio.serde.source import RegisteredSchema

AVRO_FORMAT: Final = "avro"
PROTOBUF_FORMAT: Final = "protobuf"
JSON_FORMAT: Final = "json"
FORMATS: Final = (JSON_FORMAT, AVRO_FORMAT, PROTOBUF_FORMAT)
"""Formats of keys and values, as `--value-format` names them."""
_KINDS: Final = {
    AVRO_FORMAT: SchemaType.AVRO,
    PROTOBUF_FORMAT: SchemaType.PROTOBUF,
    JSON_FORMAT: SchemaType.JSON,
}
_EXTRAS: Final = {AVRO_FORMAT: "avro", PROTOBUF_FORMAT: "protobuf"}

WRITERS_MAX: Final = 1_000
"""Maximum number of writer schemas that a decoder keeps compiled."""
DECODERS_MAX: Final = 32


@dataclass(frozen=True, slots=True)
class ColumnFormat:
    """How the values of a column are encoded. Hashable and small, so it is what is sent to tasks."""

    format: str
    schema: str = ""
    """Schema text; for Protobuf a serialized `FileDescriptorSet` in base64. With a registry it is the reader schema."""
    references: tuple[str, ...] = ()
    """Texts of the schemas that an Avro reader schema uses."""
    writer_schema: str = ""
    """Avro without a registry: schema with which the values were written, if it is not `schema`."""
    message: str = ""
    """Full name of the Protobuf message; by default the only one, or the first of the registered file."""
    registry: str = ""
    """Address of the schema registry; without it, values have no schema id."""
    subject: str = ""
    credentials: RegistryCredentials | None = field(default=None, repr=False)

    def check(self) -> None:
        """Raise `ConfigError` for an incomplete format, `MissingExtra` if a package for it is not installed."""
        if self.format not in FORMATS:
            raise ConfigError(f"there is no format {self.format!r}: {', '.join(FORMATS)}")
        if not self.schema and not (self.registry and self.subject):
            raise ConfigError(f"format {self.format} needs a schema, or a schema registry and a subject")
        if self.message and self.format != PROTOBUF_FORMAT:
            raise ConfigError(f"a message name is for protobuf, not for {self.format}")
        if self.format in _EXTRAS:
            require_extra(_EXTRAS[self.format])


class ColumnDecoder(Protocol):
    """Decodes columns of encoded values."""

    @property
    def type(self) -> pa.DataType:
        """The type of the decoded column. The type of a subject grows when a later version of it is found."""

    def decode(self, values: list[bytes | None]) -> DecodedColumn:
        """Decode values. Raises `SchemaRegistryError` if the registry cannot be used."""


def open_decoder(
    column: ColumnFormat, base: pa.DataType | None = None, *, is_fixed: bool = False
) -> ColumnDecoder:
    """Return the decoder of a format. `base`: a type that the column has at least. `is_fixed`: the column has exactly
    the type `base`: later fields are ignored, and wider ones make their values malformed.

    Raises `ConfigError`, `MissingExtra`, `UnsupportedSchema` and `SchemaRegistryError`.
    """
    column.check()
    if not column.registry:
        return PlainDecoder(column, base, is_fixed=is_fixed)
    registry = SchemaRegistry(column.registry, column.credentials)
    if column.schema:
        return ReaderDecoder(column, registry, base, is_fixed=is_fixed)
    return SubjectDecoder(column, registry, base, is_fixed=is_fixed)


@lru_cache(maxsize=DECODERS_MAX)
def cached_decoder(
    column: ColumnFormat, base: pa.DataType | None = None, *, is_fixed: bool = False
) -> ColumnDecoder:
    """`open_decoder`, once per process and arguments: a Python worker of Spark runs many tasks."""
    return open_decoder(column, base, is_fixed=is_fixed)


def _target_type(kind: pa.DataType, base: pa.DataType | None, *, is_fixed: bool) -> pa.DataType:
    """Return the type of a column for a schema of type `kind`. Raises `UnsupportedSchema` if `base` cannot hold its
    values.
    """
    if base is None:
        return kind
    if not is_fixed:
        return merge_types(base, kind)
    check_readable(kind, base)
    return base


class PlainDecoder:
    """Decoder of values without a schema id."""

    def __init__(
        self, column: ColumnFormat, base: pa.DataType | None = None, *, is_fixed: bool = False
    ) -> None:
        kind, self._decode = _plain_schema(column)
        self._type = _target_type(kind, base, is_fixed=is_fixed)

    @property
    def type(self) -> pa.DataType:
        return self._type

    def decode(self, values: list[bytes | None]) -> DecodedColumn:
        objects, errors = decode_objects(values, self._decode)
        return to_column(objects, self._type, errors)


class ReaderDecoder:
    """Decoder of values in the registry's wire format to the type of a reader schema."""

    def __init__(
        self,
        column: ColumnFormat,
        registry: SchemaRegistry,
        base: pa.DataType | None = None,
        *,
        is_fixed: bool = False,
    ) -> None:
        self._column = column
        self._registry = registry
        kind, self._plain = _plain_schema(column)
        self._type = _target_type(kind, base, is_fixed=is_fixed)
        self._writers: dict[tuple[SchemaKey, tuple[int, ...]], Decode | str] = {}

    @property
    def type(self) -> pa.DataType:
        return self._type

    def decode(self, values: list[bytes | None]) -> DecodedColumn:
        objects, errors = decode_objects(values, self._decode_one)
        return to_column(objects, self._type, errors)

    def _decode_one(self, value: bytes) -> Any:
        schema, rest = split_schema_key(value)
        indexes: tuple[int, ...] = ()
        if self._column.format == PROTOBUF_FORMAT:
            indexes, rest = split_message_indexes(rest)
        decode = self._writers.get((schema, indexes))
        if decode is None:
            if len(self._writers) >= WRITERS_MAX:
                self._writers.clear()
            decode = self._writers[schema, indexes] = self._writer(schema, indexes)
        if isinstance(decode, str):
            raise MalformedValue(decode)
        return decode(rest)

    def _writer(self, schema: SchemaKey, indexes: tuple[int, ...]) -> Decode | str:
        """Return the decoding function for a writer schema, or the reason why there is none."""
        column = self._column
        try:
            found = (
                self._registry.schema_by_id(schema)
                if isinstance(schema, int)
                else self._registry.schema_by_guid(schema)
            )
        except SchemaNotFound as error:
            return error.message
        if found.kind != _KINDS[column.format]:
            return f"schema id {schema} is a schema of type {found.kind}, not {_KINDS[column.format]}"
        try:
            if column.format == AVRO_FORMAT:
                from mansio.schemas.avro import AvroSchema

                writer = AvroSchema(found.text, _texts(found))
                return writer.decoder(AvroSchema(column.schema, column.references))
            if column.format == PROTOBUF_FORMAT:
                from mansio.serde.codecs.descriptor_pools import message_name, pool_of_files

                pool, file = pool_of_files(found.text, found.references)
                wanted, written = _message_of(column), message_name(pool, file, indexes)
                if wanted != written:
                    return f"the value is a {written} message, not {wanted}"
        except (UnsupportedSchema, MalformedValue) as error:
            return f"schema id {schema}: {error.message}"
        return self._plain


class SubjectDecoder:
    """Decoder of values in the registry's wire format to a type that has the fields of all versions of a subject."""

    def __init__(
        self,
        column: ColumnFormat,
        registry: SchemaRegistry,
        base: pa.DataType | None = None,
        *,
        is_fixed: bool = False,
    ) -> None:
        """Read all versions of the subject. Raises `UnsupportedSchema` if none of them can be used."""
        self._column = column
        self._registry = registry
        self._type = base
        self._is_fixed = False
        self._last_version = 0
        self._writers: dict[SchemaKey, _Writer | str] = {}
        self._message = column.message
        self.refresh()
        if len(self.rejected) == len(self._writers):
            reason = next(iter(self.rejected.values()), "there is none")
            raise UnsupportedSchema(f"no version of subject {column.subject} can be used: {reason}")
        if is_fixed and base is not None and base != self._type:
            self._type = base
            self._restrict(base)
        self._is_fixed = is_fixed

    @property
    def type(self) -> pa.DataType:
        assert self._type is not None, "the constructor found a version"
        return self._type

    @property
    def rejected(self) -> dict[SchemaKey, str]:
        """The versions that cannot be decoded: reason by schema id, and by GUID where the registry has one."""
        return {schema: one for schema, one in self._writers.items() if isinstance(one, str)}

    def decode(self, values: list[bytes | None]) -> DecodedColumn:
        if any(self._is_unknown(value) for value in values if value is not None):
            self.refresh()
        objects, errors = decode_objects(values, self._decode_one)
        return to_column(objects, self.type, errors)

    def _is_unknown(self, value: bytes) -> bool:
        try:
            return split_schema_key(value)[0] not in self._writers
        except NotFramed:
            return False

    def _decode_one(self, value: bytes) -> Any:
        schema, rest = split_schema_key(value)
        writer = self._writers.get(schema)
        if writer is None:
            raise MalformedValue(f"schema id {schema} is not of subject {self._column.subject}")
        if isinstance(writer, str):
            raise MalformedValue(writer)
        return writer.decode(rest)

    def refresh(self) -> None:
        """Read the versions that were registered since the last call. Raises `SchemaRegistryError`."""
        for version in self._registry.versions(self._column.subject):
            if version <= self._last_version:
                continue
            found = self._registry.version(self._column.subject, version)
            writer = self._writers[found.schema_id] = self._writer(found.schema, version)
            if found.schema.guid is not None:
                self._writers[found.schema.guid] = writer
            self._last_version = version

    def _writer(self, schema: RegisteredSchema, version: int) -> _Writer | str:
        """Return the writer of a version, whose fields are added to the type; or the reason why it is rejected."""
        where = f"version {version} of subject {self._column.subject}"
        if schema.kind != _KINDS[self._column.format]:
            return f"{where} is a schema of type {schema.kind}, not {_KINDS[self._column.format]}"
        try:
            writer = _registered_writer(self._column.format, schema, self._message)
            if self._type is None:
                self._type = writer.type
            elif self._is_fixed:
                check_readable(writer.type, self._type)
            else:
                self._type = merge_types(self._type, writer.type)
        except UnsupportedSchema as error:
            hint = ". Start the query again to read it" if self._is_fixed else ""
            return f"{where} cannot be decoded: {error.message}{hint}"
        self._message = self._message or writer.message
        return writer

    def _restrict(self, base: pa.DataType) -> None:
        """Reject the writers whose values do not fit into the type of a query that is already planned."""
        for schema_id, writer in self._writers.items():
            if isinstance(writer, str):
                continue
            try:
                check_readable(writer.type, base)
            except UnsupportedSchema as error:
                self._writers[schema_id] = (
                    f"a schema of subject {self._column.subject} does not fit into the columns of this query:"
                    f" {error.message}. Start the query again to read it"
                )


@dataclass(frozen=True, slots=True)
class _Writer:
    """A registered schema: its column type, and a function that decodes what follows the schema id."""

    type: pa.DataType
    decode: Decode
    message: str = ""


def _registered_writer(name: str, schema: RegisteredSchema, message: str) -> _Writer:
    if name == AVRO_FORMAT:
        from mansio.schemas.avro import AvroSchema

        avro = AvroSchema(schema.text, _texts(schema))
        return _Writer(avro.type, avro.decoder())
    if name == JSON_FORMAT:
        document = JsonSchema(schema.text, _texts(schema))
        return _Writer(document.type, document.decode)
    from mansio.schemas.protobuf import ProtobufSchema
    from mansio.serde.codecs.descriptor_pools import first_message, message_name, pool_of_files

    pool, file = pool_of_files(schema.text, schema.references)
    wanted = message or first_message(pool, file)
    found = ProtobufSchema(pool, wanted)

    def decode(value: bytes) -> Any:
        indexes, rest = split_message_indexes(value)
        written = message_name(pool, file, indexes)
        if written != wanted:
            raise MalformedValue(f"the value is a {written} message, not {wanted}")
        return found.decode(rest)

    return _Writer(found.type, decode, wanted)


def _plain_schema(column: ColumnFormat) -> tuple[pa.DataType, Callable[[bytes], Any]]:
    """Column type of the schema of a format, and the function that decodes values without a schema id."""
    if column.format == AVRO_FORMAT:
        from mansio.schemas.avro import AvroSchema

        reader = AvroSchema(column.schema, column.references)
        if column.writer_schema:
            return reader.type, AvroSchema(column.writer_schema).decoder(reader)
        return reader.type, reader.decoder()
    if column.format == JSON_FORMAT:
        document = JsonSchema(column.schema)
        return document.type, document.decode
    from mansio.schemas.protobuf import ProtobufSchema
    from mansio.serde.codecs.descriptor_pools import pool_of_descriptor_set

    message = ProtobufSchema(pool_of_descriptor_set(_descriptor_set(column)), _message_of(column))
    return message.type, message.decode


def _message_of(column: ColumnFormat) -> str:
    from mansio.serde.codecs.descriptor_pools import default_message

    return column.message or default_message(_descriptor_set(column), takes_first=bool(column.registry))


def _descriptor_set(column: ColumnFormat) -> bytes:
    try:
        return base64.b64decode(column.schema, validate=True)
    except (binascii.Error, ValueError):
        raise UnsupportedSchema("a Protobuf schema is a FileDescriptorSet in base64") from None


def latest_reader_schema(registry: SchemaRegistry, subject: str, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the latest version of a subject as `ColumnFormat.schema` and `references`.

    Raises `UnsupportedSchema` if it is of another format, `SchemaNotFound`, `SchemaRegistryError`.
    """
    found = registry.latest_version(subject).schema
    if found.kind != _KINDS[name]:
        raise UnsupportedSchema(f"subject {subject} has schemas of type {found.kind}, not {_KINDS[name]}")
    if name != PROTOBUF_FORMAT:
        return found.text, _texts(found)
    from mansio.serde.codecs.descriptor_pools import descriptor_set_of_files

    return base64.b64encode(descriptor_set_of_files(found.text, found.references)).decode(), ()


def _texts(schema: RegisteredSchema) -> tuple[str, ...]:
    """Return the texts of the schemas that one uses. Avro's named types have their names in them."""
    return tuple(dict.fromkeys(one.text for one in schema.references))


def encode_schema_file(name: str, content: bytes) -> str:
    """Return the content of a schema file as `ColumnFormat.schema`. Raises `UnsupportedSchema` if it is not text."""
    if name == PROTOBUF_FORMAT:
        return base64.b64encode(content).decode()
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise UnsupportedSchema(f"the {name} schema is not UTF-8 text") from None
