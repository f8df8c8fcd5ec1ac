"""Causes of dead letters: dead letters of one group and topic whose reasons differ only in numbers and ids.

Needs neither Spark nor pyarrow.

Invariants:
* Equal dead letters have equal causes in every run and on every machine: the id of a cause is valid in later commands.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mansio.wire.internal_records.dead_letter_headers import DeadLetterHeaders

CAUSE_ID_CHARACTERS: Final = 10
TEMPLATE_CHARACTERS_MAX: Final = 200

_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_HEXADECIMAL = re.compile(
    r"\b(?:0x[0-9a-f]+|(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{8,})\b", re.IGNORECASE
)
_TIME = re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?(?!\d)")
_NUMBER = re.compile(r"(?<![A-Za-z_0-9])[+-]?\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a dead letter. `message`: Kafka's text, rejected or too many attempts. `template`: the reason that
    the consumer gave, with placeholders for numbers and ids; empty if it gave none.
    """

    group: str
    topic: str
    message: str
    template: str

    @property
    def id(self) -> str:
        """Short id of the cause, a hash of its fields."""
        text = json.dumps([self.group, self.topic, self.message, self.template], ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:CAUSE_ID_CHARACTERS]


def cause_of(headers: DeadLetterHeaders) -> Cause:
    """Return the cause of a dead letter with these headers."""
    return Cause(headers.group, headers.topic, headers.message, reason_template(headers.reason))


def reason_template(reason: str) -> str:
    """Return the reason on one line, with placeholders for UUIDs, times, hexadecimal ids and numbers, and truncated."""
    line = " ".join(reason.split())
    for pattern, placeholder in (
        (_UUID, "<uuid>"),
        (_TIME, "<time>"),
        (_HEXADECIMAL, "<hex>"),
        (_NUMBER, "<n>"),
    ):
        line = pattern.sub(placeholder, line)
    return line if len(line) <= TEMPLATE_CHARACTERS_MAX else f"{line[: TEMPLATE_CHARACTERS_MAX - 1]}…"
