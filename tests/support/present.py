"""A value that the test knows to be there."""

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """`value`, which the scene made; `None` fails the test."""
    assert value is not None
    return value
