"""Avro: values of a schema as bytes, as Python values, and as plain JSON (Apache Avro 1.12, binary encoding).

Python values are those of fastavro: dict, list, str, bytes, int, float, bool, None; Decimal, date, time, datetime and
UUID for logical types. A branch of a union may be chosen by a tuple (name, value).

Plain JSON:

* bytes and fixed are base64, decimals a string or a number, uuid a string, dates, times and timestamps ISO 8601 or the
  number of the encoding; NaN, Infinity and -Infinity are strings
* a union needs no tag where one branch fits. The tag of Avro's JSON encoding, an object with the name of the branch as
  its only key, is accepted and has precedence; it is written where the value alone would lead to another branch.

Invariants:
* fastavro reads only what is bounded: it recurses on the C stack, and loops as often as the data says. Where the schema
  allows depth, values that take no bytes, or long decimals, the data is scanned first.
* fastavro writes only what has been converted: by itself it would write 1.5 as the int 1.
"""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import fastavro

from mansio.serde.codecs.avro_json import to_json
from mansio.serde.codecs.avro_scan import scan
from mansio.serde.codecs.avro_schemas import parse_avro
from mansio.serde.codecs.avro_types import FREE_VALUES_MAX, FreeValues, TypeCompiler
from mansio.serde.codecs.avro_values import JSON, PYTHON
from mansio.serde.codecs.paths import fault
from mansio.serde.definition import SchemaType
from mansio.serde.errors import UnsupportedSchema, reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.serde.definition import ReferencedSchema

_VALUE: Final = "value"
"""Field of the record around the schema."""
_SHORT_DECIMAL_BYTES: Final = 1_000
"""A value that is not longer has no decimal that takes long to convert."""


class AvroCodec:
    """Codec of an Avro schema. `name`: full name of its record, enum or fixed; empty for another type."""

    kind: Literal[SchemaType.AVRO] = SchemaType.AVRO

    def __init__(self, text: str, references: Sequence[ReferencedSchema] = ()) -> None:
        """Raise `UnsupportedSchema` for an invalid schema, and for one that exceeds a bound."""
        self._schema, named = parse_avro(
            text, dict.fromkeys(one.text for one in references), root_field=_VALUE
        )
        compiler = TypeCompiler(named)
        try:
            self._type = compiler.compile(self._schema["fields"][0]["type"])
        except (KeyError, TypeError, RecursionError) as error:
            raise UnsupportedSchema(f"this is no Avro schema: {reason(error)}") from error
        self.name: str = self._type.tag if self._type.kind in ("record", "enum", "fixed") else ""
        free = FreeValues()
        self._free_values = max(free.count(one) for one in compiler.types)
        self._is_scanned = compiler.is_recursive or any(
            one.kind == "array" and one.items is not None and free.is_empty(one.items)
            for one in compiler.types
        )
        self._has_decimals = any(one.kind == "bytes" and one.logical == "decimal" for one in compiler.types)

    def encode(self, value: Any) -> bytes:
        """Encode a Python value. Raises `MalformedValue` with the path of what does not match the schema."""
        return self._write(PYTHON.convert(self._type, value))

    def decode(self, data: bytes, reader: AvroCodec | None = None) -> Any:
        """Decode a value to Python values, as the schema of `reader` if given (schema resolution). Raises
        `MalformedValue`."""
        return self._read(data, reader, has_names=False)

    def encode_json(self, value: Any) -> bytes:
        """Encode a value in plain JSON. Raises `MalformedValue` with the path of what does not match the schema."""
        return self._write(JSON.convert(self._type, value))

    def decode_json(self, data: bytes, reader: AvroCodec | None = None) -> Any:
        """Decode a value to plain JSON. Raises `MalformedValue`."""
        return to_json((reader or self)._type, self._read(data, reader, has_names=True))

    def _write(self, converted: Any) -> bytes:
        stream = BytesIO()
        try:
            fastavro.schemaless_writer(stream, self._schema, {_VALUE: converted})
        except Exception as error:  # fastavro raises errors of many types for a value that does not match
            raise fault(None, f"does not match its Avro schema: {_cause(error)}") from error
        return stream.getvalue()

    def _read(self, data: bytes, reader: AvroCodec | None, *, has_names: bool) -> Any:
        if (
            self._is_scanned
            or self._free_values * (len(data) + 1) > FREE_VALUES_MAX
            or (self._has_decimals and len(data) > _SHORT_DECIMAL_BYTES)
        ):
            scan(self._type, data)
        stream = BytesIO(data)
        target = None if reader is None else reader._schema
        try:
            found = fastavro.schemaless_reader(stream, self._schema, target, return_named_type=has_names)
        except Exception as error:  # fastavro raises errors of many types for malformed bytes
            scan(self._type, data)  # names the fault, if it is one of the bytes
            raise fault(None, f"cannot be read with its Avro schema: {_cause(error)}") from error
        if stream.tell() != len(data):
            raise fault(None, f"has {len(data) - stream.tell()} bytes after the end of its Avro encoding")
        return cast("dict[str, Any]", found)[_VALUE]


def _cause(error: Exception) -> str:
    text = reason(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
