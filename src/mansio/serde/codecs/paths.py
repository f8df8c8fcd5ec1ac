"""Paths to a part of a value, for errors: `$.legs[3].gate`."""

from __future__ import annotations

from typing import Final

from mansio.serde.errors import MalformedValue, reason

Path = tuple["Path", str | int] | None
"""Where a part of a value is: the path of what contains it, and its name or index; None for the whole value. Text is
made of it for an error only."""

VALUE_DEPTH_MAX: Final = 100
"""Maximum depth of lists and objects in a value."""


PATH_CHARACTERS_MAX: Final = 150


def shown_path(path: Path) -> str:
    """Return a path as text; of a long one the begin and the end."""
    parts = []
    while path is not None:
        path, part = path
        parts.append(f"[{part}]" if isinstance(part, int) else f".{part}")
    text = "".join(("$", *reversed(parts)))
    half = PATH_CHARACTERS_MAX // 2
    return text if len(text) <= PATH_CHARACTERS_MAX else f"{text[:half]}...{text[-half:]}"


def fault(path: Path, text: str) -> MalformedValue:
    """Return the error of a part of a value. `text`: what is wrong with it, as `is a string, not an int`."""
    return MalformedValue(reason(f"{shown_path(path)} {text}"))


def shown_type(value: object) -> str:
    """Return what a value is, in the words of JSON where it has them."""
    names = {bool: "a boolean", str: "a string", list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), f"of type {type(value).__name__}")
