"""Encoder and decoder of keys and values with the schemas of a registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from mansio.errors import ConfigError
from mansio.serde.codecs.compiled import compile_codec
from mansio.serde.definition import SchemaDefinition, SchemaType
from mansio.serde.errors import MalformedValue, SchemaRegistryError
from mansio.serde.frames import (
    find_frame,
    header_name,
    message_indexes_bytes,
    schema_key_bytes,
)
from mansio.serde.http_source import HttpSource
from mansio.serde.schema_cache import SchemaCache
from mansio.serde.subjects import SubjectNames

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self
    from uuid import UUID

    from mansio.serde.codecs.compiled import Codec
    from mansio.serde.http_registry import RegistryCredentials
    from mansio.serde.source import RegisteredSchema, SchemaSource

LATEST_S: Final = 10.0
"""How long the latest version of a subject counts as the latest, in seconds."""


class EncodedValue(NamedTuple):
    """An encoded key or value whose schema is named in a header of the record. `data`: the key or value;
    `headers`: what the record needs besides its other headers."""

    data: bytes
    headers: tuple[tuple[str, bytes], ...]


class _Entry(NamedTuple):
    """A schema and its codec."""

    schema: RegisteredSchema
    codec: Codec


class Serde:
    """Encoder and decoder of keys and values: Avro, JSON Schema and Protobuf, with the schemas of a registry.

    Formats of values: see the documentation, "Schemas". It is used on one event loop; schemas are cached.
    """

    def __init__(
        self,
        source: str | SchemaSource,
        *,
        credentials: RegistryCredentials | None = None,
        subject_names: SubjectNames = SubjectNames.TOPIC,
        auto_register: bool = True,
    ) -> None:
        """`source`: address of a registry with Confluent's HTTP API, or another source of schemas. `credentials`: for
        an address; by default `MANSIO_SCHEMA_REGISTRY_USER` and `MANSIO_SCHEMA_REGISTRY_PASSWORD`. `subject_names`:
        the subjects of topics. `auto_register`: whether `encode` registers a definition that its subject does not have;
        otherwise that is `SchemaNotFound`.

        Raises `ConfigError` for an address that is none, or to which credentials would be sent unencrypted.
        """
        self._source = HttpSource(source, credentials) if isinstance(source, str) else source
        self._subject_names = subject_names
        self._auto_register = auto_register
        self._entries: SchemaCache[_Entry] = SchemaCache()
        self._latest: SchemaCache[int] = SchemaCache(kept_s=LATEST_S)
        self._definitions: SchemaCache[int] = SchemaCache()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the requests that are under way."""
        for cache in (self._entries, self._latest, self._definitions):
            await cache.close()

    async def encode(
        self,
        topic: str,
        value: Any,
        *,
        is_key: bool = False,
        schema: Literal["latest"] | int | SchemaDefinition = "latest",
        subject: str | None = None,
        message: str = "",
        is_json: bool = False,
    ) -> bytes | None:
        """Return a key or value of `topic` as bytes that begin with the id of the schema. None stays None.

        `schema`: the latest version of the subject, the id of a schema, or a definition. `subject`: by default as
        `subject_names` says. `message`: full name of the Protobuf message; by default that of a message object, or the
        first of the file. `is_json`: `value` is plain JSON, in which for example bytes are base64 and timestamps ISO
        8601.

        Raises `MalformedValue` with the path of what does not match the schema, `UnsupportedSchema`,
        `SchemaNotFound`, `SchemaRegistryError`, `MissingExtra`, and `ConfigError` if the subject is not known.
        """
        if value is None:
            return None
        entry = await self._writer(topic, value, schema, subject, is_key=is_key)
        if entry.schema.schema_id is None:
            raise SchemaRegistryError("the source of schemas has named a schema without its id")
        indexes, payload = encoded(entry.codec, value, message, is_json=is_json)
        return schema_key_bytes(entry.schema.schema_id) + indexes + payload

    async def encode_with_headers(
        self,
        topic: str,
        value: Any,
        *,
        is_key: bool = False,
        schema: Literal["latest"] | int | SchemaDefinition = "latest",
        subject: str | None = None,
        message: str = "",
        is_json: bool = False,
    ) -> EncodedValue:
        """Return a key or value of `topic` as bytes without a frame, and the header that has the GUID of the schema.

        Parameters and errors are those of `encode`, but the value must not be None; `SchemaRegistryError` also if the
        registry has no GUIDs.
        """
        entry = await self._writer(topic, value, schema, subject, is_key=is_key)
        if entry.schema.guid is None:
            raise SchemaRegistryError("the registry names no GUID of the schema: headers need one")
        indexes, payload = encoded(entry.codec, value, message, is_json=is_json)
        return EncodedValue(
            payload, ((header_name(is_key=is_key), schema_key_bytes(entry.schema.guid) + indexes),)
        )

    async def decode(
        self,
        topic: str,
        data: bytes | None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        *,
        is_key: bool = False,
        reader: Literal["latest"] | int | SchemaDefinition | None = None,
        as_json: bool = False,
    ) -> Any:
        """Return the value of a key or value of `topic`. None stays None.

        `headers`: the headers of the record, which may name the schema. `reader`: the schema as which an Avro value is
        read (schema resolution), and with which a JSON value is validated; by default that with which it was written.
        `as_json`: return plain JSON, as `encode` takes with `is_json`.

        Raises `MalformedValue`, which is `NotFramed` if the record names no schema; `UnsupportedSchema`,
        `SchemaNotFound`, `SchemaRegistryError`, `MissingExtra`.
        """
        if data is None:
            return None
        frame = find_frame(data, headers, is_key=is_key)
        entry = await self._entry(frame.schema)
        codec = entry.codec
        if codec.kind is SchemaType.PROTOBUF:
            indexes, payload = frame.message()
            name = codec.message(indexes)
            return codec.decode_json(payload, name) if as_json else codec.decode(payload, name)
        wanted = None if reader is None else await self._reader(topic, codec, reader, is_key=is_key)
        decode: Any = codec.decode_json if as_json else codec.decode
        return decode(frame.payload(), wanted)

    async def _reader(
        self, topic: str, writer: Codec, schema: Literal["latest"] | int | SchemaDefinition, *, is_key: bool
    ) -> Codec:
        subject = None if isinstance(schema, int) else self._subject(topic, writer.name, is_key=is_key)
        found = await self._resolved(schema, subject, registers=False)
        if found.codec.kind is not writer.kind:
            raise MalformedValue(
                f"the value is written as {writer.kind}, and cannot be read as {found.codec.kind}"
            )
        return found.codec

    async def _writer(
        self,
        topic: str,
        value: Any,
        schema: Literal["latest"] | int | SchemaDefinition,
        subject: str | None,
        *,
        is_key: bool,
    ) -> _Entry:
        if subject is None and not isinstance(schema, int):
            subject = self._subject(topic, _record_name(value, schema), is_key=is_key)
        return await self._resolved(schema, subject, registers=self._auto_register)

    def _subject(self, topic: str, record_name: str, *, is_key: bool) -> str:
        return self._subject_names.subject(topic, record_name, is_key=is_key)

    async def _resolved(
        self,
        schema: Literal["latest"] | int | SchemaDefinition,
        subject: str | None,
        *,
        registers: bool,
    ) -> _Entry:
        if isinstance(schema, int):
            return await self._entry(schema)
        assert subject is not None, "it is known for all but an id"
        if isinstance(schema, SchemaDefinition):
            ask = self._source.register if registers else self._source.look_up
            key = (subject, schema, registers)
            return await self._entry(await self._definitions.get(key, lambda: ask(subject, schema)))
        if schema != "latest":
            raise ConfigError(f"a schema is 'latest', an id or a SchemaDefinition, not {schema!r}")

        async def latest() -> int:
            return (await self._source.latest(subject)).schema_id

        return await self._entry(await self._latest.get(subject, latest))

    async def _entry(self, schema: int | UUID) -> _Entry:
        async def request() -> _Entry:
            found = await (
                self._source.schema_by_id(schema)
                if isinstance(schema, int)
                else self._source.schema_by_guid(schema)
            )
            return _Entry(found, compile_codec(found))

        return await self._entries.get(schema, request)


def encoded(codec: Codec, value: Any, message: str, *, is_json: bool) -> tuple[bytes, bytes]:
    """Return the encoded message indexes, none but for Protobuf, and the encoded value. `message`: the full name of the
    message of Protobuf, "" for that of the value, or the first one. `is_json`: the value is plain JSON.

    Raises `MalformedValue`, `ConfigError`."""
    if codec.kind is SchemaType.PROTOBUF:
        name = message or _message_name(value) or codec.name
        payload = codec.encode_json(value, name) if is_json else codec.encode(value, name)
        return message_indexes_bytes(codec.indexes(name)), payload
    if message:
        raise ConfigError(f"a message name is for Protobuf, and the schema is {codec.kind}")
    return b"", codec.encode_json(value) if is_json else codec.encode(value)


def _message_name(value: Any) -> str:
    """Return the full name of a message object of Protobuf; empty for another value."""
    descriptor = getattr(type(value), "DESCRIPTOR", None)
    return str(getattr(descriptor, "full_name", ""))


def _record_name(value: Any, schema: Literal["latest"] | int | SchemaDefinition) -> str:
    """Return the name of the record type, as far as it is known without a registry."""
    if isinstance(schema, SchemaDefinition) and schema.kind is not SchemaType.PROTOBUF:
        import json

        try:
            parsed = json.loads(schema.text)
        except (ValueError, RecursionError):
            return ""  # the registry refuses it
        if not isinstance(parsed, dict):
            return ""
        if schema.kind is SchemaType.JSON:
            return str(parsed.get("title") or "")
        name, namespace = str(parsed.get("name") or ""), parsed.get("namespace")
        return f"{namespace}.{name}" if namespace and name and "." not in name else name
    return _message_name(value)
