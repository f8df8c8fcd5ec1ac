"""Name of the user of a client certificate: its subject as Kafka prints it, mapped by rules (KIP-371).

The subject is printed as Java's `X500Principal.getName()` does (RFC 2253), so that the principals in ACLs are the same
as in Kafka: attributes in reverse order; nine keywords, other attributes as numbers with a value of `#` and the hex
digits of its DER (e-mail and serialNumber among them); `,=+<>#;"\\`, and spaces at both ends, escaped everywhere.

A subject with text that versions of Java print differently is refused: characters beyond ASCII in a type other than
UTF8String (Java 17 takes them for UTF-8, Java 25 for Latin-1), any BMPString, and invalid UTF-8, which Java replaces,
so that different subjects would have the same name.

`ssl.principal.mapping.rules` is a list of `DEFAULT` and `RULE:pattern/replacement/[LU]`. The first rule whose pattern
matches the whole subject gives the name; a subject that no rule matches is refused. `/L` and `/U` change the name to
lower and upper case. The patterns are those of `group_pattern`, without backtracking: a subject can come from anyone
who gets certificates from the authority. Kafka replaces each part of the subject that the pattern finds, which makes a
difference for patterns that also match an empty text: `.*` gives its replacement twice there.

OpenSSL has verified the certificate before; this module reads what it needs of the DER, and raises `InvalidSubject` for
anything else.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import ConfigError, InvalidRegularExpression, MansioError
from mansio.state.authentication.der import (
    OBJECT_IDENTIFIER,
    SEQUENCE,
    SET,
    InvalidDer,
    elements,
    expect,
    only,
)
from mansio.state.authentication.group_pattern import GroupPattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.state.authentication.der import Element

SUBJECT_BYTES_MAX: Final = 4_096
SUBJECT_CHARACTERS_MAX: Final = 1_024
"""Maximum length of a printed subject that is mapped by a pattern."""
NUMBER_BYTES_MAX: Final = 64
"""Maximum size of an object identifier."""
RULES_MAX: Final = 32
DEFAULT_RULES: Final = "DEFAULT"

_VERSION: Final = 0xA0
_UTF_8, _PRINTABLE, _T61, _IA5, _GENERAL, _BMP = 0x0C, 0x13, 0x14, 0x16, 0x1B, 0x1E
_FIELDS: Final = ("serialNumber", "signature", "issuer", "validity", "subject")
"""Fields of a certificate (RFC 5280) up to the subject, without the version, which is optional."""
_ENCODINGS: Final = {_UTF_8: "utf-8", **dict.fromkeys((_PRINTABLE, _T61, _IA5, _GENERAL), "ascii")}
"""Types of text -> encoding that is accepted."""

_KEYWORDS: Final = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.1": "UID",
    "0.9.2342.19200300.100.1.25": "DC",
}
_ESCAPED: Final = str.maketrans({character: f"\\{character}" for character in ',=+<>#;"\\'} | {"\0": "\\00"})
_BLANKS: Final = " \r"

_RULE: Final = re.compile(
    r"(?P<default>DEFAULT)"
    r"|RULE:(?P<pattern>(?:\\.|[^\\/])*)/(?P<replacement>(?:\\.|[^\\/])*)/(?P<letter_case>[LU]?)",
    re.DOTALL,
)
_BETWEEN_RULES: Final = re.compile(r"[\s,]*")
_AFTER_RULE: Final = re.compile(r"\s*(?:,|\Z)")
_REPLACEMENT_PART: Final = re.compile(
    r"\\(?P<escaped>.)|\$(?P<digits>[0-9]{1,4})|(?P<text>[^\\$]+)", re.DOTALL
)


class InvalidSubject(MansioError):
    """The subject of the certificate cannot be used as a name."""


class MappingRules:
    """The rules of `ssl.principal.mapping.rules`."""

    __slots__ = ("_rules",)

    def __init__(self, text: str = DEFAULT_RULES) -> None:
        """Parse and compile rules. Raises `ConfigError`."""
        self._rules = list(_parse_rules(text))
        if len(self._rules) > RULES_MAX:
            raise ConfigError(f"ssl_principal_mapping_rules: more than {RULES_MAX} rules")

    def name(self, subject: str) -> str:
        """Return the name of the user with a printed subject. Raises `InvalidSubject` if no rule matches it, and for
        an empty name."""
        for rule in self._rules:
            name = subject if rule is None else rule.apply(subject)
            if name:
                return name
            if name is not None:
                break
        raise InvalidSubject(f"no rule gives the subject {subject[:SUBJECT_CHARACTERS_MAX]!r} a name")


class _Rule(NamedTuple):
    pattern: GroupPattern
    replacement: tuple[str | int, ...]
    """Texts, and numbers of groups; 0 is the whole subject."""
    letter_case: str

    def apply(self, subject: str) -> str | None:
        if len(subject) > SUBJECT_CHARACTERS_MAX:
            raise InvalidSubject(f"the subject has more than {SUBJECT_CHARACTERS_MAX} characters")
        groups = self.pattern.match(subject)
        if groups is None:
            return None
        name = "".join(groups[part] if isinstance(part, int) else part for part in self.replacement)
        return name.lower() if self.letter_case == "L" else name.upper() if self.letter_case == "U" else name


def user_of_certificate(certificate: bytes, rules: MappingRules) -> str:
    """Return the name of the user of a certificate in DER. Raises `InvalidSubject`."""
    return rules.name(print_subject(read_subject(certificate)))


def _parse_rules(text: str) -> Iterator[_Rule | None]:
    """Yield the rules, None for `DEFAULT`. Raises `ConfigError`."""
    position = _end(_BETWEEN_RULES.match(text))
    while position < len(text):
        found = _RULE.match(text, position)
        after = found and _AFTER_RULE.match(text, found.end())
        if not found or not after:
            raise ConfigError(
                f"ssl_principal_mapping_rules: {text[position:][:80]!r} begins with no valid rule"
            )
        yield None if found["default"] else _compile_rule(found)
        position = _end(_BETWEEN_RULES.match(text, after.end()))


def _end(found: re.Match[str] | None) -> int:
    assert found is not None, "the expression matches any text"
    return found.end()


def _compile_rule(found: re.Match[str]) -> _Rule:
    try:
        pattern = GroupPattern(found["pattern"])
    except InvalidRegularExpression as error:
        raise ConfigError(f"ssl_principal_mapping_rules: {error.message}") from error
    replacement = tuple(_parse_replacement(found["replacement"], pattern.group_count))
    return _Rule(pattern, replacement, found["letter_case"])


def _parse_replacement(text: str, group_count: int) -> Iterator[str | int]:
    """Yield the parts of a replacement as Kafka reads it: `$12` is group 12 if there is one, else group 1 before a 2; a
    reference to a group that does not exist is text."""
    position = 0
    while position < len(text):
        found = _REPLACEMENT_PART.match(text, position)
        if found is None:
            raise ConfigError(
                f"ssl_principal_mapping_rules: {text[position:][:80]!r} is no valid replacement"
            )
        position = found.end()
        if found["digits"] is None:
            yield found["escaped"] or found["text"]
            continue
        digits = found["digits"]
        length = len(digits)
        while length > 1 and int(digits[:length]) > group_count:
            length -= 1
        if int(digits[:length]) > group_count:
            yield "$" + digits
        else:
            yield int(digits[:length])
            yield digits[length:]


def read_subject(certificate: bytes) -> bytes:
    """Return the subject of a certificate, both in DER. Raises `InvalidSubject`."""
    try:
        signed = next(elements(expect(only(certificate), SEQUENCE)), None)
        fields = [] if signed is None else list(elements(expect(signed, SEQUENCE)))
    except InvalidDer as error:
        raise InvalidSubject(f"the certificate has {error.message}") from None
    if fields and fields[0].tag == _VERSION:
        del fields[0]
    if len(fields) < len(_FIELDS):
        raise InvalidSubject("the certificate has no subject")
    return fields[_FIELDS.index("subject")].encoded


def print_subject(subject: bytes) -> str:
    """Return a subject in DER as Java prints it; empty for one without attributes. Raises `InvalidSubject`."""
    if len(subject) > SUBJECT_BYTES_MAX:
        raise InvalidSubject(f"the subject has more than {SUBJECT_BYTES_MAX} bytes")
    try:
        names = [
            "+".join(_print_attribute(attribute) for attribute in elements(expect(name, SET)))
            for name in elements(expect(only(subject), SEQUENCE))
        ]
    except InvalidDer as error:
        raise InvalidSubject(f"the subject of the certificate has {error.message}") from None
    return ",".join(reversed(names))


def _print_attribute(attribute: Element) -> str:
    parts = list(elements(expect(attribute, SEQUENCE)))
    if len(parts) != 2:
        raise InvalidSubject("an attribute of the subject has no type or no value")
    number = _print_number(expect(parts[0], OBJECT_IDENTIFIER))
    value = parts[1]
    keyword = _KEYWORDS.get(number)
    encoding = _ENCODINGS.get(value.tag)
    if keyword is None or (encoding is None and value.tag != _BMP):
        return f"{keyword or number}=#{value.encoded.hex()}"
    text = None if encoding is None else _decode(value.content, encoding)
    if text is None:
        raise InvalidSubject(
            f"the attribute {keyword} of the subject has characters in an unsupported encoding"
        )
    escaped = text.translate(_ESCAPED)
    inside = escaped.strip(_BLANKS)
    before = len(escaped) - len(escaped.lstrip(_BLANKS))
    blanks = escaped[:before], escaped[before + len(inside) :]
    first, last = ("".join(f"\\{blank}" for blank in part) for part in blanks)
    return f"{keyword}={first}{inside}{last}"


def _print_number(content: bytes) -> str:
    """Return an object identifier with points between its numbers (X.690, 8.19)."""
    if not 1 <= len(content) <= NUMBER_BYTES_MAX or content[-1] >= 0x80:
        raise InvalidSubject("an attribute of the subject has no valid type")
    numbers = [0]
    for byte in content:
        if byte == 0x80 and numbers[-1] == 0:
            raise InvalidSubject("an attribute of the subject has a type with leading zeros")
        numbers[-1] = numbers[-1] << 7 | byte & 0x7F
        if byte < 0x80:
            numbers.append(0)
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, (first, numbers[0] - 40 * first, *numbers[1:-1])))


def _decode(content: bytes, encoding: str) -> str | None:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError:
        return None
