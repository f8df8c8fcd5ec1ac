"""The Query protocol: parameters as a form, results and errors as XML.

    Action=SendMessageBatch&SendMessageBatchRequestEntry.1.Id=a&SendMessageBatchRequestEntry.1.MessageBody=b

Lists and maps are flattened: their items are numbered from 1. A list or map of one item may be given without a number,
`AttributeName=All` or `Attribute.Name=DelaySeconds&Attribute.Value=45`, as in the examples of AWS and in boto 2;
`AttributeName=` is an empty list. Source: AWS Query protocol (Smithy), Amazon SQS API reference.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote_to_bytes
from xml.sax.saxutils import escape

from mansio.api.sqs.queues.queue_errors import InvalidParameterValue
from mansio.api.sqs.shapes import ITEMS_MAX, REQUESTS, RESULT_NAMES, Shape, checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NAMESPACE: Final = "http://queue.amazonaws.com/doc/2012-11-05/"
PARAMETERS_MAX: Final = 2_000
_PIECE_BYTES: Final = 64 << 10
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def parse_form(body: bytes, query: str) -> dict[str, str]:
    """Return the parameters of a request in its body and its address. Raises `InvalidParameterValue`."""
    try:
        pairs = [*_pairs(body), *_pairs(query.encode("ascii"))]
    except ValueError as error:
        raise InvalidParameterValue("The body is not a form of UTF-8 parameters.") from error
    return dict(pairs)


def _pairs(form: bytes) -> Iterable[tuple[str, str]]:
    """Yield the names and values of a form. Raises `ValueError`."""
    if not form.isascii() or form.count(b"&") >= PARAMETERS_MAX:
        raise ValueError("not ASCII, or too many parameters")
    for parameter in form.split(b"&"):
        if parameter:
            name, _, value = parameter.partition(b"=")
            yield _unquoted(name), _unquoted(value)


def _unquoted(text: bytes) -> str:
    """Decode a name or value in pieces: one call creates an object for each escape. Raises `UnicodeDecodeError`."""
    text = text.replace(b"+", b" ")
    parts, start = [], 0
    while start < len(text):
        end = start + _PIECE_BYTES
        if end < len(text) and (escape := text.rfind(b"%", end - 2, end)) >= 0:
            end = escape
        parts.append(unquote_to_bytes(text[start:end]))
        start = end
    return b"".join(parts).decode()


def decode(action: str, form: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters of an action. Raises `InvalidParameterValue`, `MissingParameter`."""
    tree: dict[str, Any] = {}
    for name, value in form.items():
        parts = name.split(".")
        if len(parts) > 8:
            raise InvalidParameterValue(f"The parameter {name[:100]} does not exist.")
        at = tree
        for part in parts[:-1]:
            following = at.setdefault(part, {})
            if not isinstance(following, dict):
                raise InvalidParameterValue(f"The parameter {name[:100]} is given in two ways.")
            at = following
        if isinstance(at.get(parts[-1]), dict):
            raise InvalidParameterValue(f"The parameter {name[:100]} is given in two ways.")
        at[parts[-1]] = value
    found: dict[str, Any] = checked(REQUESTS[action], _structure(REQUESTS[action], tree), action)
    return found


def _value(shape: Shape, tree: Any, name: str) -> Any:
    if shape.kind == "structure":
        return _structure(shape, tree if isinstance(tree, dict) else {})
    if not isinstance(tree, str):
        raise InvalidParameterValue(f"The parameter {name} is not a {shape.kind}.")
    if shape.kind == "integer":
        if not re.fullmatch(r"-?[0-9]{1,10}", tree):
            raise InvalidParameterValue(f"The parameter {name} is not an integer.")
        return int(tree)
    if shape.kind == "boolean":
        return tree == "true"
    return tree


def _structure(shape: Shape, tree: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, member in (shape.members or {}).items():
        if member.kind not in ("list", "map"):
            if name in tree:
                found[name] = _value(member, tree[name], name)
            continue
        given = tree.get(member.query_names[0])
        if given is None or member.item is None:
            continue
        items = _items(given, name)
        if member.kind == "list":
            found[name] = [_value(member.item, each, name) for each in items]
        elif all(isinstance(each, dict) for each in items):
            _, key, value = member.query_names
            found[name] = {
                str(each.get(key, "")): _value(member.item, each.get(value, ""), name) for each in items
            }
        else:
            raise InvalidParameterValue(f"The entries of {name} have no names and values.")
    return found


def _items(given: Mapping[str, Any] | str, name: str) -> Sequence[Any]:
    """Return the items of a list in the order of their numbers, or the one that has no number."""
    if isinstance(given, str):
        return [given] if given else []
    numbers = [each for each in given if each.isascii() and each.isdigit()]
    if not numbers:
        return [given]
    if len(given) > ITEMS_MAX or len(numbers) < len(given):
        raise InvalidParameterValue(f"The items of {name} are not numbered, or too many.")
    return [given[number] for number in sorted(numbers, key=lambda each: int(each[:9]))]


def encode_result(action: str, result: Mapping[str, Any], request_id: str) -> bytes:
    """Return a result as XML."""
    entry = f"{action}ResultEntry"
    parts = [f'<?xml version="1.0"?><{action}Response xmlns="{NAMESPACE}">']
    if result:
        parts += (f"<{action}Result>", *_members(result, entry), f"</{action}Result>")
    parts.append(
        f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata></{action}Response>"
    )
    return "".join(parts).encode()


def _members(value: Mapping[str, Any], entry: str) -> Iterable[str]:
    for name, each in value.items():
        names = (entry,) if name == "Successful" else RESULT_NAMES.get(name, ())
        if isinstance(each, list):
            for item in each:
                yield _element(names[0], item, entry)
        elif isinstance(each, dict) and len(names) == 3:
            for key, item in each.items():
                yield f"<{names[0]}><{names[1]}>{_text(key)}</{names[1]}>{_element(names[2], item, entry)}</{names[0]}>"
        else:
            yield _element(name, each, entry)


def _element(name: str, value: Any, entry: str) -> str:
    content = "".join(_members(value, entry)) if isinstance(value, dict) else _text(value)
    return f"<{name}>{content}</{name}>"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return escape(_NOT_XML.sub("\ufffd", str(value))).replace("\r", "&#xD;")


def encode_error(code: str, message: str, *, is_sender: bool, request_id: str) -> bytes:
    """Return an error as XML."""
    kind = "Sender" if is_sender else "Receiver"
    return (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{NAMESPACE}"><Error><Type>{kind}</Type>'
        f"<Code>{_text(code)}</Code><Message>{_text(message)}</Message><Detail/></Error>"
        f"<RequestId>{request_id}</RequestId></ErrorResponse>"
    ).encode()
