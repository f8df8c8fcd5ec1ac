"""What a checkpoint belongs to: the topics a pipeline has read, by their ids, and where it writes.

Spark's checkpoint says how far a query is, and nothing that would tell when it is used for something else, or for a
topic of the same name that was deleted and made anew: the query would skip records or read them as others. So a file
`mansio.json` is laid beside Spark's own, and compared at every start.

Always true: a checkpoint without the file is new, or not ours, and is taken over only when it is empty; the file is
written before the query starts. Any file system that Spark reaches will do.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mansio.errors import MansioError, TopicRecreated

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE = "mansio.json"
PARTIAL = ".partial"


class CheckpointMismatch(MansioError):
    """The checkpoint belongs to another pipeline."""


@dataclass(frozen=True, slots=True)
class CheckpointBinding:
    """`topics`: topic -> id in hex. `target`: what is written, as people name it."""

    name: str
    topics: dict[str, str]
    target: str


def check(bound: CheckpointBinding, wanted: CheckpointBinding, checkpoint: str) -> None:
    """Whether a pipeline may go on from this checkpoint. Raises `CheckpointMismatch` and `TopicRecreated`."""
    restart_hint = "give another checkpoint, or remove this one to begin anew"
    if bound.topics.keys() != wanted.topics.keys():
        raise CheckpointMismatch(
            f"checkpoint {checkpoint} is of {', '.join(sorted(bound.topics))}, not of "
            f"{', '.join(sorted(wanted.topics))}: {restart_hint}"
        )
    for topic, found in sorted(wanted.topics.items()):
        if bound.topics[topic] != found:
            raise TopicRecreated(
                f"topic {topic} was deleted and created again since checkpoint {checkpoint} was begun, so its offsets "
                f"mean other records now: {restart_hint}"
            )
    if bound.target != wanted.target:
        raise CheckpointMismatch(
            f"checkpoint {checkpoint} is of writing {bound.target}, not {wanted.target}: {restart_hint}"
        )


def bind(spark: SparkSession, checkpoint: str, wanted: CheckpointBinding) -> None:
    """Compare with what the checkpoint belongs to, or write it down there if it is new."""
    files = _Directory(spark, checkpoint)
    text = files.read(FILE)
    if text is None:
        if files.has_entries():
            raise CheckpointMismatch(
                f"{checkpoint} holds something, but nothing that `mansio pipeline run` has written: give another "
                "checkpoint, or remove this one"
            )
        files.write(FILE, json.dumps(asdict(wanted), indent=1, sort_keys=True))
        return
    check(_parse(text, checkpoint), wanted, checkpoint)


def _parse(text: str, checkpoint: str) -> CheckpointBinding:
    try:
        found = json.loads(text)
        return CheckpointBinding(found["name"], dict(found["topics"]), found["target"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(
            f"{checkpoint}/{FILE} cannot be read ({error}): remove the checkpoint"
        ) from error


class _Directory:
    """A directory of any file system that Spark knows, by Hadoop's classes."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        assert spark._jvm is not None
        self._jvm: Any = spark._jvm
        self._path = self._jvm.org.apache.hadoop.fs.Path(location)
        self._files = self._path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def has_entries(self) -> bool:
        """Whether there is more than what an earlier start of ours left when it was killed while it wrote."""
        if not self._files.exists(self._path):
            return False
        names = [str(one.getPath().getName()) for one in self._files.listStatus(self._path)]
        return any(PARTIAL not in name for name in names)

    def read(self, name: str) -> str | None:
        path = self._jvm.org.apache.hadoop.fs.Path(self._path, name)
        if not self._files.exists(path):
            return None
        stream = self._files.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Whole or not at all: under another name first."""
        partial = self._jvm.org.apache.hadoop.fs.Path(self._path, f".{name}{PARTIAL}")
        stream = self._files.create(partial, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self._files.rename(partial, self._jvm.org.apache.hadoop.fs.Path(self._path, name))
