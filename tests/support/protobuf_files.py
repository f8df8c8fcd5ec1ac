"""Protobuf files compiled for a test, as protoc makes them for users."""

from __future__ import annotations

import base64
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import grpc_tools
from google.protobuf import descriptor_pb2, message_factory
from grpc_tools import protoc

from mansio.serde.codecs.descriptor_pools import pool_of_descriptor_set

FLIGHT_PROTO = """
syntax = "proto3";
package example;
import "google/protobuf/timestamp.proto";
message Flight {
  string carrier = 1;
  sint32 delay = 2;
  uint64 seats = 3;
  repeated string legs = 4;
  optional string gate = 5;
  google.protobuf.Timestamp leaves = 6;
  map<string, double> fares = 7;
  State state = 8;
  Plane plane = 9;
  oneof crew { int32 crew_id = 10; string crew_name = 11; }
  enum State { UNKNOWN = 0; BOARDING = 1; }
  message Plane { string tail = 1; Empty nothing = 2; }
}
message Empty {}
message Other { int32 id = 1; }
"""


@cache
def descriptor_set(text: str) -> bytes:
    """A serialized `FileDescriptorSet` of a file and all that it imports."""
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "test.proto"), Path(directory, "test.desc")
        source.write_text(text)
        well_known = Path(grpc_tools.__file__).with_name("_proto")
        arguments = [
            "",
            f"-I{directory}",
            f"-I{well_known}",
            "--include_imports",
            f"--descriptor_set_out={target}",
        ]
        assert protoc.main([*arguments, str(source)]) == 0
        return target.read_bytes()


def serialized_file(text: str) -> str:
    """The file alone as a schema registry returns it: a `FileDescriptorProto` in base64."""
    files = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set(text))
    return base64.b64encode(files.file[-1].SerializeToString()).decode()


def flight_class() -> Any:
    """The class of the message `example.Flight`."""
    pool = pool_of_descriptor_set(descriptor_set(FLIGHT_PROTO))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("example.Flight"))
