"""The code that is made from rpc.proto is what the compiler makes of it."""

from __future__ import annotations

from tools import generate_etcd


def test_generated_code_is_up_to_date() -> None:
    assert generate_etcd.stale() == [], "`python -m tools.generate_etcd` writes them"
