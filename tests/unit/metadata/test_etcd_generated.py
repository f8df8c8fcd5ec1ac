"""The code that is made from the .proto files is what the compiler makes of it."""

from __future__ import annotations

from tools import generate_protobuf


def test_generated_code_is_up_to_date() -> None:
    assert generate_protobuf.stale() == [], "`python -m tools.generate_protobuf` writes them"
