"""Checkpoint of a pipeline: the pipeline to which it belongs, and the last batch that Spark completed.

Spark stores the end offsets of a batch under `offsets/` before the batch runs, and an entry with the same id under
`commits/` when the batch is complete.

Invariants:
* A checkpoint is used only by the pipeline for which it was created, and only with the same topics and target.
* A file of this module is written completely or not at all.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException

from mansio.errors import MansioError, TopicRecreated
from mansio.pipelines.pipeline_progress import NO_BATCH
from mansio.spark.cluster.problems import MARKER_PREFIX
from mansio.spark.session.addresses import is_connect
from mansio.spark.source.offsets import FIRST_BATCH_START
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BINDING_FILE_NAME: Final = "mansio.json"
PARTIAL_FILE_SUFFIX: Final = ".partial"
PART_PREFIX: Final = "part-"
IGNORED_PREFIXES: Final = (MARKER_PREFIX, f".{MARKER_PREFIX}")
"""Beginnings of the names of files that a killed check of the cluster leaves behind, and of their checksums."""
OFFSET_LOG: Final = "offsets"
COMMIT_LOG: Final = "commits"
DIGEST_CHARACTERS: Final = 16
METADATA_FILE: Final = "metadata"
LOG_VERSION: Final = "v1"
"""First line of an entry of Spark's offset log: its format."""
LOG_HEADER_LINES: Final = 2
"""Lines before the offsets of the sources: the version, and the batch's metadata."""


class CheckpointMismatch(MansioError):
    """The checkpoint belongs to another pipeline."""


@dataclass(frozen=True, slots=True)
class CheckpointBinding:
    """What a checkpoint belongs to: the pipeline's name, the ids of its input topics (hexadecimal), and its target."""

    name: str
    topics: dict[str, str]
    target: str


def check_binding(bound: CheckpointBinding, wanted: CheckpointBinding, checkpoint: str) -> None:
    """Check that a pipeline `wanted` may resume from a checkpoint that belongs to `bound`. Raises `CheckpointMismatch`
    and `TopicRecreated`.
    """
    restart_hint = "give another checkpoint, or remove this one to start again"
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


def bind_checkpoint(checkpoint: CheckpointDirectory, wanted: CheckpointBinding) -> None:
    """Store the binding in a new checkpoint; compare it with the stored one in an existing checkpoint
    (`check_binding`).
    """
    text = checkpoint.read(BINDING_FILE_NAME)
    if text is None:
        if checkpoint.has_entries():
            raise CheckpointMismatch(
                f"{checkpoint.location} holds something, but nothing that `mansio pipeline run` has written: give "
                "another checkpoint, or remove this one"
            )
        checkpoint.write(BINDING_FILE_NAME, json.dumps(asdict(wanted), indent=1, sort_keys=True))
        return
    check_binding(_parse_binding(text, checkpoint.location), wanted, checkpoint.location)


def _parse_binding(text: str, checkpoint: str) -> CheckpointBinding:
    try:
        found = json.loads(text)
        return CheckpointBinding(found["name"], dict(found["topics"]), found["target"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointMismatch(
            f"{checkpoint}/{BINDING_FILE_NAME} cannot be read ({error}): remove the checkpoint"
        ) from error


@dataclass(frozen=True, slots=True)
class CompletedBatch:
    """The last complete batch of a query. `sources`: the end offsets of each source, as the source has written them."""

    query: str
    batch: int
    sources: tuple[str, ...]


def completed_batch(checkpoint: CheckpointDirectory) -> CompletedBatch | None:
    """Read the last batch that Spark recorded as complete. None before the first one, and for a checkpoint whose format
    is unknown.
    """
    ids = [int(name) for name in checkpoint.names(COMMIT_LOG) if name.isdecimal()]
    if not ids:
        return None
    batch = max(ids)
    lines = (checkpoint.read(f"{OFFSET_LOG}/{batch}") or "").splitlines()
    if not lines or lines[0] != LOG_VERSION:
        return None
    return CompletedBatch(query_id(checkpoint), batch, tuple(lines[LOG_HEADER_LINES:]))


def start_of_first_batch(checkpoint: CheckpointDirectory) -> CompletedBatch | None:
    """Return the state before the first batch, if Spark has planned this batch and not completed it: the start offsets,
    which the source stores in the end offsets of the batch. None if there are none.
    """
    lines = (checkpoint.read(f"{OFFSET_LOG}/0") or "").splitlines()
    is_complete = any(name.isdecimal() for name in checkpoint.names(COMMIT_LOG))
    if is_complete or not lines or lines[0] != LOG_VERSION:
        return None
    starts = (start_offsets_in(text) for text in lines[LOG_HEADER_LINES:])
    sources = tuple(text for text in starts if text is not None)
    return CompletedBatch(query_id(checkpoint), NO_BATCH, sources) if sources else None


def start_offsets_in(text: str) -> str | None:
    """Return the start offsets of a query in the end offsets of its first batch; None if they are not there."""
    try:
        start = json.loads(text).get(FIRST_BATCH_START)
    except (ValueError, AttributeError):
        return None
    return None if start is None else json.dumps(start)


def query_id(checkpoint: CheckpointDirectory) -> str:
    """Return the id of the checkpoint's query, which Spark creates with the checkpoint; empty before."""
    return str(json.loads(checkpoint.read(METADATA_FILE) or "{}").get("id", ""))


def planned_sources(checkpoint: CheckpointDirectory, batch: int) -> tuple[str, ...]:
    """Return the end offsets of each source that Spark has planned for a batch, as text; empty if it has not."""
    return tuple((checkpoint.read(f"{OFFSET_LOG}/{batch}") or "").splitlines()[LOG_HEADER_LINES:])


def planned_digest(checkpoint: CheckpointDirectory, batch: int) -> str:
    """Return a digest of the end offsets that Spark has planned for a batch; empty if it has not. A repeated batch has
    the same.
    """
    lines = planned_sources(checkpoint, batch)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGEST_CHARACTERS] if lines else ""


class CheckpointDirectory(Protocol):
    """A checkpoint's directory."""

    location: str
    """Its address, for messages."""

    def has_entries(self) -> bool:
        """Whether the directory has entries other than the file of an interrupted `write`."""

    def names(self, directory: str) -> list[str]:
        """Names of the entries of a directory below it; empty if there is none."""

    def read(self, name: str) -> str | None:
        """Return the text of a file; None if there is none."""

    def write(self, name: str, text: str) -> None:
        """Write a file completely or not at all."""

    def replace(self, name: str, text: str) -> None:
        """Write a file that may exist, completely or not at all."""


def checkpoint_directory(spark: SparkSession, location: str) -> CheckpointDirectory:
    """Return the checkpoint's directory, as the driver of this session sees it."""
    return ConnectDirectory(spark, location) if is_connect(spark) else HadoopDirectory(spark, location)


class ConnectDirectory:
    """A directory that a Spark Connect server sees, through queries: the client has no access to the JVM. A file that
    `write` creates is a directory with one part, as Spark writes it.
    """

    def __init__(self, spark: SparkSession, location: str) -> None:
        self.location = location
        """The address of the directory."""
        self._spark = spark

    def has_entries(self) -> bool:
        """Whether the directory has files other than those of an interrupted `write`."""
        return bool(self.names("."))

    def names(self, directory: str) -> list[str]:
        """Names of the files in and below a directory of this one (`.`: this one); empty if it does not exist."""
        reader = self._spark.read.format("binaryFile").option("recursiveFileLookup", "true")
        try:
            rows = reader.load(f"{self.location}/{directory}").select("path").collect()
        except AnalysisException as error:
            _raise_unless_missing(error)
            return []
        return [str(row.path).rpartition("/")[2] for row in rows]

    def read(self, name: str) -> str | None:
        """Return the text of a file; None if it does not exist."""
        try:
            rows = self._spark.read.text(f"{self.location}/{name}", wholetext=True).collect()
        except AnalysisException as error:
            _raise_unless_missing(error)
            return None
        return str(rows[0].value) if rows else None

    def write(self, name: str, text: str) -> None:
        """Write a file as Spark does: its part is renamed when it is complete."""
        rows = self._spark.createDataFrame([(text,)], "value string").coalesce(1)
        rows.write.mode("overwrite").text(f"{self.location}/{name}")

    def replace(self, name: str, text: str) -> None:
        """Write a file that may exist. The old one may be gone if the server ends meanwhile."""
        self.write(name, text)


def _raise_unless_missing(error: AnalysisException) -> None:
    """Raise an error of a query again, unless the path does not exist."""
    if error.getCondition() != "PATH_NOT_FOUND":
        raise copied(error)


class HadoopDirectory:
    """A directory on any file system that Spark supports, through Hadoop's classes."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        assert spark._jvm is not None
        self.location = location
        """The address of the directory."""
        self._jvm: Any = spark._jvm
        self._gateway: Any = spark.sparkContext._gateway
        self._path = self._jvm.org.apache.hadoop.fs.Path(location)
        self._files = self._path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())

    def has_entries(self) -> bool:
        """Whether the directory has entries other than the file of an interrupted `write`."""
        return any(
            PARTIAL_FILE_SUFFIX not in name and not name.startswith(IGNORED_PREFIXES)
            for name in self.names(".")
        )

    def names(self, directory: str) -> list[str]:
        """Names of the entries of a directory below this one, or of this one (`.`); empty if it does not exist."""
        path = self._jvm.org.apache.hadoop.fs.Path(self._path, directory)
        if not self._files.exists(path):
            return []
        return [str(one.getPath().getName()) for one in self._files.listStatus(path)]

    def read(self, name: str) -> str | None:
        """Return the text of a file; None if it does not exist."""
        path = self._jvm.org.apache.hadoop.fs.Path(self._path, name)
        if not self._files.exists(path):
            return None
        if self._files.getFileStatus(path).isDirectory():  # written by `ConnectDirectory`
            parts = [one for one in self.names(name) if one.startswith(PART_PREFIX)]
            return self.read(f"{name}/{parts[0]}") if parts else None
        stream = self._files.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Write a file under another name, then rename it, which is atomic where the file system's rename is. Raises
        `OSError` if it cannot be renamed, on some file systems because the file exists."""
        partial = self._write_partial(name, text)
        if not self._files.rename(partial, self._jvm.org.apache.hadoop.fs.Path(self._path, name)):
            raise OSError(f"cannot rename {partial.toString()} to {name}")

    def replace(self, name: str, text: str) -> None:
        """Write a file under another name, then rename it over the one that may exist, in one step, as Spark does for
        its logs. A file system without this step, such as an object store, replaces a file when it is closed."""
        hadoop = self._jvm.org.apache.hadoop.fs
        path, partial = hadoop.Path(self._path, name), self._write_partial(name, text)
        try:
            context = hadoop.FileContext.getFileContext(self._path.toUri(), self._files.getConf())
            overwrite = self._gateway.new_array(getattr(hadoop, "Options$Rename"), 1)
            overwrite[0] = getattr(hadoop, "Options$Rename").OVERWRITE
            context.rename(partial, path, overwrite)
        except Py4JJavaError as error:
            if not error.java_exception.getClass().getSimpleName().startswith("Unsupported"):
                raise
            self._write_to(path, text)
            self._files.delete(partial, False)

    def _write_partial(self, name: str, text: str) -> Any:
        """Write the file under the name of an incomplete one, and return its path."""
        partial = self._jvm.org.apache.hadoop.fs.Path(self._path, f".{name}{PARTIAL_FILE_SUFFIX}")
        self._write_to(partial, text)
        return partial

    def _write_to(self, path: Any, text: str) -> None:
        stream = self._files.create(path, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
