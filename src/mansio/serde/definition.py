"""Definition of a schema, as a client registers it, and what a parser makes of it.

Model: the REST API of Confluent's schema registry.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.state.registry.schema import SchemaReference


class SchemaType(StrEnum):
    """Format of a schema, as the REST API names it (`schemaType`)."""

    AVRO = "AVRO"
    """Apache Avro; the text is JSON."""
    JSON = "JSON"
    """JSON Schema; the text is JSON."""
    PROTOBUF = "PROTOBUF"
    """Protocol Buffers; the text is that of a .proto file, or a serialized `FileDescriptorProto` in base64."""


class SchemaDefinition(NamedTuple):
    """A schema as it is registered: its format, its text and its references."""

    kind: SchemaType
    text: str
    references: tuple[SchemaReference, ...] = ()


class ReferencedSchema(NamedTuple):
    """A schema that another one refers to as `name`."""

    name: str
    text: str


class ParsedSchema(Protocol):
    """A valid schema.

    `text`: the text that the registry stores. `identity`: equal for two schemas of the same format if the registry
    treats them as the same schema, as far as their references are equal.
    """

    @property
    def text(self) -> str: ...

    @property
    def identity(self) -> str: ...

    @property
    def record_names(self) -> Sequence[str]:
        """Full names of the records that the schema describes: of an Avro type, if it has one; of the messages of
        Protobuf, nested ones included; the title of a JSON Schema, if it has one."""


class SchemaParser(Protocol):
    """The function `parse` of a module in `mansio.serde.formats`."""

    def __call__(
        self, text: str, references: Sequence[ReferencedSchema] = (), *, normalize: bool = False
    ) -> ParsedSchema:
        """Parse a schema. `references`: the schemas that it refers to, directly or not, each after those that it refers
        to itself. `normalize`: the text and the identity are those of the normalized schema, which is the same for
        schemas that differ in nothing that matters to their meaning.

        Raises `InvalidSchema`.
        """


class Incompatibility(NamedTuple):
    """Why a reader cannot read what was written. `rule`: type of the incompatibility, as the public documentation of
    the format or of Confluent's schema registry names it, for example READER_FIELD_MISSING_DEFAULT_VALUE. `path`:
    place in the schema of the reader, for example `/fields/0/type`. `message`: one line for people."""

    rule: str
    path: str
    message: str
