"""The least rights of each pipeline job: what its user needs where access control lists decide.

`mansio doctor --job` checks them, and "Least rights" of the page about pipelines lists them. Pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.config.topic_names import TRACE_TOPIC
from mansio.state.authorization.acl_words import adding_command, word_of
from mansio.state.authorization.acls import (
    WILDCARD,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from mansio.wire.internal_records.hold_metadata import pipeline_group_id
from mansio.wire.query_transactional_ids import PREFIX as QUERY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

TOPIC: Final = "TOPIC"
TARGET: Final = "TARGET"
PIPELINE: Final = "PIPELINE"
"""Names in the rights of a job that stand for those of its options."""


class Job(StrEnum):
    """Jobs by the names of their commands; `read` and `write`: a program with `format("mansio")`."""

    READ = "read"
    WRITE = "write"
    RUN = "run"
    RUN_TO_TOPIC = "run-to-topic"
    BACKFILL = "backfill"
    ARCHIVE = "archive"
    UNION = "union"
    REPLAY = "replay"
    MIRROR_SOURCE = "mirror-source"
    MIRROR_TARGET = "mirror-target"
    MAINTAIN = "maintain"
    ERASE = "erase"
    COMPACT = "compact"
    HOT_KEYS = "hot-keys"
    SCHEMA_CHECK = "schema-check"
    DLQ = "dlq"
    TRACE_REPORT = "trace-report"
    LAG = "lag"
    RELEASE = "release"


class Right(NamedTuple):
    """An operation on the resources of a name; with `is_prefix`, on all whose names begin with it."""

    operation: Operation
    resource_type: ResourceType
    name: str
    is_prefix: bool = False

    def command(self, principal: str) -> str:
        """Return the command that gives this right to a principal."""
        pattern = PatternType.PREFIXED if self.is_prefix else PatternType.LITERAL
        return adding_command(
            Acl(
                self.resource_type,
                pattern,
                self.name,
                principal,
                WILDCARD,
                self.operation,
                Permission.ALLOW,
            )
        )

    def __str__(self) -> str:
        more = "..." if self.is_prefix else ""
        return f"{self.operation.name} on {word_of(self.resource_type)} {self.name}{more}"


_READ_TOPIC: Final = Right(Operation.READ, ResourceType.TOPIC, TOPIC)
_HOLD: Final = Right(Operation.READ, ResourceType.GROUP, pipeline_group_id(PIPELINE))
_WRITE_TARGET: Final = Right(Operation.WRITE, ResourceType.TOPIC, TARGET)
_WRITE_IN_TRANSACTIONS: Final = Right(
    Operation.WRITE, ResourceType.TRANSACTIONAL_ID, f"{QUERY_PREFIX}:", is_prefix=True
)
_MIRROR: Final = "mansio-mirror"

_RIGHTS: Final[Mapping[Job, tuple[Right, ...]]] = {
    Job.READ: (_READ_TOPIC,),
    Job.WRITE: (_WRITE_TARGET, _WRITE_IN_TRANSACTIONS),
    Job.RUN: (_READ_TOPIC, _HOLD),
    Job.RUN_TO_TOPIC: (_READ_TOPIC, _HOLD, _WRITE_TARGET, _WRITE_IN_TRANSACTIONS),
    Job.BACKFILL: (_READ_TOPIC,),
    Job.ARCHIVE: (_READ_TOPIC, _HOLD),
    Job.UNION: (_READ_TOPIC,),
    Job.REPLAY: (
        Right(Operation.READ, ResourceType.TOPIC, TARGET),
        _WRITE_TARGET,
        Right(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, TARGET),
        _WRITE_IN_TRANSACTIONS,
    ),
    Job.MIRROR_SOURCE: (
        _READ_TOPIC,
        Right(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, TOPIC),
        Right(Operation.DESCRIBE, ResourceType.GROUP, WILDCARD),
        _HOLD,
    ),
    Job.MIRROR_TARGET: (
        Right(Operation.CREATE, ResourceType.TOPIC, TARGET),
        _WRITE_TARGET,
        Right(Operation.ALTER, ResourceType.TOPIC, TARGET),
        Right(Operation.ALTER_CONFIGS, ResourceType.TOPIC, TARGET),
        Right(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, TARGET),
        Right(Operation.READ, ResourceType.TOPIC, TARGET),
        Right(Operation.CREATE, ResourceType.TOPIC, f"{_MIRROR}.", is_prefix=True),
        Right(Operation.READ, ResourceType.TOPIC, f"{_MIRROR}.", is_prefix=True),
        Right(Operation.WRITE, ResourceType.TOPIC, f"{_MIRROR}.", is_prefix=True),
        Right(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, f"{_MIRROR}.", is_prefix=True),
        Right(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, f"{_MIRROR}:", is_prefix=True),
        Right(Operation.READ, ResourceType.GROUP, WILDCARD),
    ),
    Job.MAINTAIN: (),
    Job.ERASE: (),
    Job.COMPACT: (),
    Job.HOT_KEYS: (_READ_TOPIC,),
    Job.SCHEMA_CHECK: (_READ_TOPIC,),
    Job.DLQ: (_READ_TOPIC,),
    Job.TRACE_REPORT: (_READ_TOPIC, Right(Operation.READ, ResourceType.TOPIC, TRACE_TOPIC)),
    Job.LAG: (
        Right(Operation.DESCRIBE, ResourceType.GROUP, pipeline_group_id(""), is_prefix=True),
        Right(Operation.DESCRIBE, ResourceType.TOPIC, TOPIC),
    ),
    Job.RELEASE: (
        Right(Operation.DELETE, ResourceType.GROUP, pipeline_group_id(PIPELINE)),
        _READ_TOPIC,
    ),
}


def least_rights(job: Job) -> Sequence[Right]:
    """Return the rights of a job, with `TOPIC`, `TARGET` and `PIPELINE` in place of names."""
    return _RIGHTS[job]


def rights_of(
    job: Job, topics: Iterable[str] = (), targets: Iterable[str] = (), pipeline: str | None = None
) -> list[Right]:
    """Return the rights of a job with these topics, targets and name. Rights on what is not given are left out."""
    values: Mapping[str, Sequence[str]] = {TOPIC: [*topics], TARGET: [*targets]}
    held = pipeline_group_id(PIPELINE)
    rights: dict[Right, None] = {}
    for right in _RIGHTS[job]:
        if right.name == held:
            names: Sequence[str] = () if pipeline is None else [pipeline_group_id(pipeline)]
        else:
            names = values.get(right.name, [right.name])
        rights |= dict.fromkeys(right._replace(name=name) for name in names)
    return [*rights]
