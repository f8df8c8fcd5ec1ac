"""Files that a Protobuf schema can import without a reference.

* `google/protobuf/*.proto`, which protoc brings (`WELL_KNOWN_PREFIX`)
* `google/type/*.proto`, from the package googleapis-common-protos
* `confluent/meta.proto`, `confluent/type/decimal.proto` and `confluent/type/variant.proto`, which clients of
  Confluent's schema registry do not register. The declarations here follow the numbers and types in the public
  documentation of these clients; a test compares them with those of confluent-kafka.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Final

WELL_KNOWN_PREFIX: Final = "google/protobuf/"
_GOOGLE_TYPE_PREFIX: Final = "google/type/"
_CONFLUENT_META: Final = """
syntax = "proto3";
package confluent;
import "google/protobuf/descriptor.proto";
message Meta {
  string doc = 1;
  map<string, string> params = 2;
  repeated string tags = 3;
  repeated Rule rules = 4;
}
message Rule {
  string name = 1;
  string doc = 2;
  string expr = 3;
  string sql = 4;
}
extend google.protobuf.FileOptions { Meta file_meta = 1088; }
extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }
"""
_CONFLUENT_DECIMAL: Final = """
syntax = "proto3";
package confluent.type;
message Decimal {
  bytes value = 1;
  uint32 precision = 2;
  int32 scale = 3;
}
"""
_CONFLUENT_VARIANT: Final = """
syntax = "proto3";
package confluent.type;
message Variant {
  bytes metadata = 1;
  bytes value = 2;
}
"""
_CONFLUENT: Final = {
    "confluent/meta.proto": _CONFLUENT_META,
    "confluent/type/decimal.proto": _CONFLUENT_DECIMAL,
    "confluent/type/variant.proto": _CONFLUENT_VARIANT,
    "confluent/types/decimal.proto": 'syntax = "proto3"; import public "confluent/type/decimal.proto";',
}


def well_known_directory() -> str:
    """Return the directory with the files `google/protobuf/*.proto` and nothing else."""
    import grpc_tools

    return str(Path(grpc_tools.__file__).with_name("_proto"))


def is_well_known(name: str) -> bool:
    """Whether protoc brings a file. A reference of this name does not replace it."""
    return name.startswith(WELL_KNOWN_PREFIX) and Path(well_known_directory(), name).is_file()


def common_files(texts: list[str]) -> dict[str, str]:
    """Return, by name, the files outside google/protobuf that one of the texts may import."""
    found: dict[str, str] = {}
    if any(_GOOGLE_TYPE_PREFIX in text for text in texts):
        found |= _google_types()
    if any("confluent/" in text for text in texts):
        found |= _CONFLUENT
    return found


@cache
def _google_types() -> dict[str, str]:
    spec = importlib.util.find_spec("google.type")
    places = spec.submodule_search_locations if spec is not None else None
    return {
        _GOOGLE_TYPE_PREFIX + file.name: file.read_text("utf-8")
        for place in places or ()
        for file in sorted(Path(place).glob("*.proto"))
    }
