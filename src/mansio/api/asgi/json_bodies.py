"""JSON bodies: large ones are counted before they are parsed, and parsed in pieces; repeated keys are refused.

One call of a JSON parser holds the event loop until it has built every object, and a few kilobytes of a compressed body
can hold ten million. Therefore a body of more than `PIECE_BYTES` is parsed only after its values were counted, or one
element of its list after the other, and other connections are served in between.

A body of more than `PART_BYTES` whose list has the usual form is parsed in parts, at the speed of a whole one
(`split_list`), so that it does not hold the loop for more than about a millisecond.

Invariants:
* One call of a parser builds at most `VALUES_MAX` values, or parses at most `PIECE_BYTES`.
* Of the large bodies of one broker one is parsed at a time; the others wait for their turn as bytes.
* A body in which a key occurs twice in one object is refused (RFC 8259, 4: what it means is not defined).
"""

from __future__ import annotations

import codecs
import json
import re
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from mansio.api.asgi.problems import InvalidField, from_validation
from mansio.errors import MessageTooLarge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from pydantic import TypeAdapter

    from mansio.api.turns import Turns

PIECE_BYTES: Final = 256 << 10
"""A body up to this size is parsed at once: this takes 15 ms at most."""

PART_BYTES: Final = 12 << 10
"""Approximate size of the parts of `split_list`."""

VALUES_MAX: Final = 50_000
"""Maximum number of values in a body of more than `PIECE_BYTES`, or in one element of a list that is parsed in
pieces."""

VALUE_BYTES_MAX: Final = 2 << 20
"""Maximum size of a JSON body, or of one element of a list that is parsed in pieces."""

ELEMENTS_AT_ONCE: Final = 100
"""Elements of a list that are validated in one call."""

_STEPS: Final = 2_000
_BETWEEN_OBJECTS: Final = re.compile(rb"\}[ \t\n\r]*,[ \t\n\r]*\{")
_STRUCTURE: Final = re.compile(r"[{}\[\],]")
_STRING: Final = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""The content of a string, or what is left of it."""

_STRING_CHARACTERS: Final = 128 << 10
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_KEY_CHARACTERS_MAX: Final = 100


async def count_values(data: bytes, turns: Turns, values_max: int = VALUES_MAX) -> None:
    """Count the values of a JSON text without parsing it. Raises `InvalidField` if there are more than `values_max`."""
    text = data.decode("latin-1")  # only ASCII characters are counted
    for found in value_counts(text, 0):
        if found > values_max:
            raise InvalidField("", f"the body has more than {values_max} JSON values")
        await turns.pause()


def value_counts(text: str, start: int) -> Iterator[int]:
    """Yield how many values a JSON value has so far, it included; the last number is that of all. Ends behind the
    value, or with the text. Of malformed text it is any number."""
    values, depth, at = 1, 0, start
    for step in count(1):
        quote = text.find('"', at)
        for found in _STRUCTURE.finditer(text, at, len(text) if quote < 0 else quote):
            character = found[0]
            if character in "}]":
                depth -= 1
            else:
                values += 1
                depth += character != ","
            if depth <= 0:
                yield values
                return
            if not values % _STEPS:
                yield values
        if quote < 0:
            break
        if not step % _STEPS:
            yield max(values, step // 2)  # each second string is a key, or there is a value between them
        at = text.find('"', quote + 1) + 1
        if not at:
            break
        if text.find("\\", quote, at) >= 0:
            at = quote + 1
            while (part := _STRING.match(text, at, at + _STRING_CHARACTERS)) is not None:
                end = part.end()
                if end == at or end >= len(text) or text[end] == '"':  # a backslash can be the last character
                    at = end + 1
                    break
                at = end
                yield values
    yield values


def check_keys(data: bytes) -> None:
    """Raise `InvalidField` if a key occurs twice in one object of a JSON text, which a parser has accepted."""
    try:
        _DECODER.decode(data.decode())
    except RecursionError as error:
        raise InvalidField("", "the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidField("", f"this is not JSON: {str(error)[:200]}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise InvalidField("", f"the key {name[:_KEY_CHARACTERS_MAX]!r} occurs twice in one object")
            seen.add(name)
    return found


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique)


def split_list(data: bytes, member: str) -> list[bytes]:
    """Split a body `{"MEMBER": [{...}, ...]}` between objects of its list into bodies of about `PART_BYTES`; return
    one part if it has another form.

    A split can be inside a string or a nested value. Then the part before it is not JSON, as a quotation mark or a
    bracket is missing: if all parts are JSON, the body is, and has their elements."""
    head = re.match(rb'\s*\{\s*"%b"\s*:\s*\[' % member.encode(), data)
    if head is None:
        return [data]
    parts: list[bytes] = []
    begin, opening = 0, b""
    while (found := _BETWEEN_OBJECTS.search(data, max(begin, head.end()) + PART_BYTES)) is not None:
        parts.append(b"%b%b]}" % (opening, data[begin : found.start() + 1]))
        begin, opening = found.end() - 1, head[0]
    parts.append(opening + data[begin:])
    return parts


class ElementReader:
    """Reads a large body `{"MEMBER": [...]}` element by element."""

    def __init__(self, data: bytes, member: str, turns: Turns) -> None:
        """Create a reader; the caller holds `turns` while it reads."""
        self._data = data
        self._member = member
        self._turns = turns
        self._read_bytes = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0

    async def pieces(self, adapter: TypeAdapter[Any], elements_max: int) -> AsyncIterator[Any]:
        """Yield lists of validated elements, together at least one and at most `elements_max`. `adapter`: of such a
        list. Raises `InvalidField`."""
        for token in ("{", f'"{self._member}"', ":", "["):
            await self._expect(token)
        first, found = 0, []
        for number in count():
            if number == elements_max:
                raise InvalidField(f"/{self._member}", f"there are more than {elements_max}")
            found.append(await self._element(f"/{self._member}/{number}"))
            await self._turns.pause()
            is_last = await self._next_character() == "]"
            await self._expect("]" if is_last else ",")
            if is_last:
                await self._expect("}")
                if await self._next_character():
                    raise InvalidField("", "this is not JSON: there is more behind its end")
            if is_last or len(found) == ELEMENTS_AT_ONCE:
                try:
                    yield adapter.validate_python(found, strict=True)
                except ValidationError as error:
                    raise from_validation(error, f"/{self._member}", first) from error
                first, found = number + 1, []
            if is_last:
                return

    async def _element(self, pointer: str) -> Any:
        """Return the next element, with its values counted first if it is large. Raises `InvalidField`,
        `MessageTooLarge`."""
        if await self._next_character() != "{":
            raise InvalidField(pointer, "this is not a JSON object")
        while True:
            try:
                found, end = _DECODER.scan_once(self._text, self._at)  # type: ignore[attr-defined]
            except InvalidField as error:
                raise InvalidField(pointer, error.fields[0][1]) from None
            except RecursionError:
                raise InvalidField(pointer, "this is nested too deeply") from None
            except (ValueError, StopIteration):
                if self._is_read:
                    raise InvalidField(pointer, "this is not JSON") from None
            else:
                self._at = end
                return found
            size = len(self._text) - self._at
            if size > VALUE_BYTES_MAX:
                raise MessageTooLarge(
                    f"{pointer} has more than {VALUE_BYTES_MAX} bytes: publish it as a raw body"
                )
            self._extend()
            if size > PIECE_BYTES // 2:
                for values in value_counts(self._text, self._at):
                    if values > VALUES_MAX:
                        raise InvalidField(pointer, f"this has more than {VALUES_MAX} JSON values")
                    await self._turns.pause()

    async def _expect(self, token: str) -> None:
        """Skip a token. Raises `InvalidField`."""
        await self._next_character()
        while len(self._text) - self._at < len(token) and not self._is_read:
            self._extend()
        if not self._text.startswith(token, self._at):
            raise InvalidField(
                "", f'a body of more than {PIECE_BYTES} bytes is JSON of the form {{"{self._member}": [...]}}'
            )
        self._at += len(token)

    async def _next_character(self) -> str:
        """Skip white space and return the character behind it, "" at the end."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text) or self._is_read:
                return self._text[self._at : self._at + 1]
            self._extend()
            await self._turns.pause()

    @property
    def _is_read(self) -> bool:
        return self._read_bytes >= len(self._data)

    def _extend(self) -> None:
        """Decode as many characters as are left, or a piece: what needs them all is searched twice at most."""
        end = self._read_bytes + max(PIECE_BYTES, len(self._text) - self._at)
        part = self._data[self._read_bytes : end]
        self._read_bytes = end
        try:
            added = self._utf8.decode(part, final=self._is_read)
        except UnicodeDecodeError as error:
            raise InvalidField("", "this is not UTF-8") from error
        self._text = self._text[self._at :] + added
        self._at = 0
