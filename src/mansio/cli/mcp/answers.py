"""Texts of answers: JSON of a bounded size. Pure functions.

What is too large is shortened: the longest lists lose items, then texts their ends. `left_out` counts the items that
are missing, by the place of their list, and a shortened text ends with a mark.

Invariants:
* A text is valid JSON of at most `ANSWER_BYTES_MAX` bytes in UTF-8, whatever it is made of.
* `command`, the command that shows more, is never shortened.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ANSWER_BYTES_MAX: Final = 4_096
TEXT_CHARACTERS_MAX: Final = 400
"""Length to which each text is shortened, whether the answer is too large or not."""
TEXT_CHARACTERS_MIN: Final = 24
"""Length below which no text is shortened."""
ITEMS_MAX: Final = ANSWER_BYTES_MAX // 2
"""Number of the smallest items that fit into an answer."""
DEPTH_MAX: Final = 12
"""Number of lists and objects within each other from which on only a mark is shown."""
BOTH_ENDS: Final = frozenset({"events"})
"""Lists that lose their middle; others lose their end."""
COMMAND: Final = "command"
LEFT_OUT: Final = "left_out"


def answer_text(answer: Mapping[str, Any], *, bytes_max: int = ANSWER_BYTES_MAX) -> str:
    """Return an answer as JSON of at most `bytes_max` bytes."""
    command = answer.get(COMMAND)
    tree = {name: _clean(value, 0) for name, value in answer.items()}
    if command is not None:
        tree[COMMAND] = _valid(str(command))
    left_out: dict[str, int] = {}
    for path, items in list(_lists(tree, "")):
        _shorten(path, items, ITEMS_MAX, left_out)
    while len((text := _encode(tree, left_out)).encode()) > bytes_max:
        if not _shorten_something(tree, left_out):
            return _last_resort(tree.get(COMMAND), bytes_max)
    return text


def _encode(tree: Mapping[str, Any], left_out: Mapping[str, int]) -> str:
    whole = {**tree, LEFT_OUT: left_out} if left_out else tree
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def _size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def _last_resort(command: Any, bytes_max: int) -> str:
    for tree in ({COMMAND: command, LEFT_OUT: "the answer"}, {LEFT_OUT: "the answer"}):
        text = _encode(tree, {})
        if len(text.encode()) <= bytes_max:
            return text
    return "{}"


def _clean(value: Any, depth: int) -> Any:
    """Return a copy of which JSON can express everything, with shortened texts."""
    if isinstance(value, str):
        return _shortened(_valid(value), TEXT_CHARACTERS_MAX)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None
    if isinstance(value, dict | list | tuple) and depth >= DEPTH_MAX:
        return "…"
    if isinstance(value, dict):
        return {_valid(str(name)): _clean(each, depth + 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(each, depth + 1) for each in value]
    return _shortened(_valid(str(value)), TEXT_CHARACTERS_MAX)


def _valid(text: str) -> str:
    """Return a text without surrogates, which UTF-8 cannot express."""
    return text.encode(errors="replace").decode()


def _shortened(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else f"{text[: characters_max - 1]}…"


def _shorten_something(tree: dict[str, Any], left_out: dict[str, int]) -> bool:
    """Shorten what takes the most space: a list with several items, or else a text, or else a list with one item.
    Returns false if there is nothing left."""
    lists = [(path, items) for path, items in _lists(tree, "") if items]
    several = [each for each in lists if len(each[1]) > 1]
    if several:
        path, items = max(several, key=lambda each: _size(each[1]))
        _shorten(path, items, len(items) * 3 // 4, left_out)
        return True
    texts = [
        (parent, place)
        for parent, place in _texts(tree)
        if len(parent[place]) > TEXT_CHARACTERS_MIN and not (parent is tree and place == COMMAND)
    ]
    if texts:
        parent, place = max(texts, key=lambda each: _size(each[0][each[1]]))
        parent[place] = _shortened(parent[place], len(parent[place]) // 2)
        return True
    if lists:
        path, items = lists[0]
        _shorten(path, items, 0, left_out)
        return True
    return False


def _shorten(path: str, items: list[Any], count: int, left_out: dict[str, int]) -> None:
    excess = len(items) - count
    if excess <= 0:
        return
    begin = count - count // 2 if path.rpartition(".")[2] in BOTH_ENDS else count
    del items[begin : begin + excess]
    left_out[path] = left_out.get(path, 0) + excess


def _lists(node: Any, path: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield all lists with their places, outer ones first."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _lists(value, f"{path}.{name}" if path else name)
    elif isinstance(node, list):
        yield path, node
        for number, value in enumerate(node):
            yield from _lists(value, f"{path}[{number}]")


def _texts(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parent and the place in it of all texts."""
    for place, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, str):
            yield node, place
        elif isinstance(value, dict | list):
            yield from _texts(value)
