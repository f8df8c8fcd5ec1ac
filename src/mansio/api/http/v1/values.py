"""Keys, values and headers of records in JSON.

A value is one of the members `value` (text), `json` (any JSON value) or `base64`, a key `key` (text) or `key_base64`. A
header is a name and a text, null, or `{"base64": "..."}`. None of the members: the value or key is null.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from mansio.api.asgi.problems import InvalidField

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mansio.wire.batch.record_batch import Header

ValueFormat = Literal["auto", "text", "json", "base64"]
"""How values are returned. auto: as text if they are UTF-8, otherwise in Base64. text, json: as such if they are, and
in Base64 otherwise, as is JSON of more than 2 MiB or 50,000 values."""

HEADERS_MAX: Final = 200


class BinaryHeader(TypedDict):
    """Binary content of a header."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    base64: str


Headers = Annotated[dict[str, str | BinaryHeader | None], Field(max_length=HEADERS_MAX)]


class Record(BaseModel):
    """A record as it is returned."""

    receipt: str = Field(
        "", description="Of a leased record: names this delivery in ack, retry, reject and extend."
    )
    delivery_count: int = Field(0, description="Of a leased record: 1 for the first delivery.")
    topic: str
    partition: int
    offset: int
    timestamp_ms: int = Field(description="Since the Unix epoch.")
    key: str | None = Field(None, description="Key, if it is UTF-8.")
    key_base64: str = Field("", description="Key, if it is not UTF-8.")
    value: str | None = Field(None, description="Value as text; null if the record has none.")
    json_: Any = Field(None, alias="json", description="Value as JSON, with `values=json`.")
    base64: str = Field("", description="Value in Base64, if it is neither of them.")
    headers: dict[str, str | BinaryHeader | None] = Field(description="The last one of each name.")


def decode_base64(text: str, pointer: str) -> bytes:
    """Decode Base64 (RFC 4648). Raises `InvalidField`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidField(pointer, "this is not Base64") from error


def encode_text(text: str, pointer: str) -> bytes:
    """Encode text as UTF-8. Raises `InvalidField`."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidField(pointer, "this is not valid Unicode") from error


def decode_value(record: dict[str, Any], pointer: str) -> bytes | None:
    """Return the value of a record in JSON. Raises `InvalidField`."""
    found = [name for name in ("value", "json", "base64") if name in record]
    if len(found) > 1:
        raise InvalidField(f"{pointer}/{found[1]}", f"a record has {found[0]} or {found[1]}, not both")
    if not found:
        return None
    content = record[found[0]]
    if found[0] == "json":
        try:
            return json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        except ValueError as error:
            raise InvalidField(f"{pointer}/json", "this has no JSON form") from error
    if content is None:
        return None
    return (
        encode_text(content, f"{pointer}/value")
        if found[0] == "value"
        else decode_base64(content, f"{pointer}/base64")
    )


def decode_key(record: dict[str, Any], pointer: str) -> bytes | None:
    """Return the key of a record in JSON. Raises `InvalidField`."""
    key, binary = record.get("key"), record.get("key_base64")
    if key is not None and binary is not None:
        raise InvalidField(f"{pointer}/key_base64", "a record has key or key_base64, not both")
    if key is not None:
        return encode_text(key, f"{pointer}/key")
    return None if binary is None else decode_base64(binary, f"{pointer}/key_base64")


def decode_headers(headers: Headers, pointer: str) -> list[Header]:
    """Return headers in JSON as those of a record. Raises `InvalidField`."""
    found: list[Header] = []
    for name, content in headers.items():
        if content is None or isinstance(content, str):
            found.append((name, None if content is None else encode_text(content, f"{pointer}/{name}")))
        else:
            found.append((name, decode_base64(content["base64"], f"{pointer}/{name}/base64")))
    return found


def encode_value(value: bytes | None, as_: ValueFormat) -> dict[str, Any]:
    """Return the members of a record that hold its value."""
    if value is None:
        return {"value": None}
    if as_ == "json":
        try:
            return {"json": json.loads(value, parse_float=_finite, parse_constant=_finite)}
        except (ValueError, RecursionError):
            return {"base64": base64.b64encode(value).decode()}
    if as_ != "base64":
        try:
            return {"value": value.decode()}
        except UnicodeDecodeError:
            pass
    return {"base64": base64.b64encode(value).decode()}


def _finite(text: str) -> float:
    """Return a number. Raises `ValueError` for one that JSON cannot express again."""
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(text)
    return found


def encode_key(key: bytes | None) -> dict[str, Any]:
    """Return the members of a record that hold its key."""
    if key is None:
        return {"key": None}
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key_base64": base64.b64encode(key).decode()}


def encode_headers(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, Any]:
    """Return headers in JSON; of several with one name, the last one."""
    found: dict[str, Any] = {}
    for name, content in headers:
        try:
            found[name] = None if content is None else content.decode()
        except UnicodeDecodeError:
            found[name] = {"base64": base64.b64encode(content or b"").decode()}
    return found
