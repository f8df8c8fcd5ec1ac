"""The codec of a registered schema, of whatever format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.host.extras import require_extra
from mansio.serde.definition import SchemaType

if TYPE_CHECKING:
    from mansio.serde.codecs.avro import AvroCodec
    from mansio.serde.codecs.json_schema import JsonSchemaCodec
    from mansio.serde.codecs.protobuf import ProtobufCodec
    from mansio.serde.source import RegisteredSchema

    Codec = AvroCodec | JsonSchemaCodec | ProtobufCodec

EXTRAS: Final = {
    SchemaType.AVRO: "avro",
    SchemaType.JSON: "jsonschema",
    SchemaType.PROTOBUF: "protobuf",
}
"""The extra that each format needs."""


def compile_codec(schema: RegisteredSchema) -> Codec:
    """Return the codec of a schema. Raises `UnsupportedSchema`, `MissingExtra`."""
    require_extra(EXTRAS[schema.kind])
    if schema.kind is SchemaType.AVRO:
        from mansio.serde.codecs.avro import AvroCodec

        return AvroCodec(schema.text, schema.references)
    if schema.kind is SchemaType.JSON:
        from mansio.serde.codecs.json_schema import JsonSchemaCodec

        return JsonSchemaCodec(schema.text, schema.references)
    from mansio.serde.codecs.protobuf import ProtobufCodec

    return ProtobufCodec(schema.text, schema.references)
