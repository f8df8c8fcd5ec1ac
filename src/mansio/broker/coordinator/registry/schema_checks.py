"""Checks of schemas by the schema worker, another process: it parses them, and compares them with earlier versions.

Invariants:
* A job ends after `JOB_MS_MAX`, with the process if need be. At most `WAITING_MAX` jobs wait.
* A schema has at most `TEXT_CHARACTERS_MAX` characters, with the schemas that it refers to `REFERRED_CHARACTERS_MAX`.
"""

from __future__ import annotations

import json
from base64 import b64decode
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import InvalidRecord, RequestTimedOut, ThrottlingQuotaExceeded, Unavailable
from mansio.ports import FileJob
from mansio.serde.worker_jobs import run_job
from mansio.state.registry import refusals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.ports import FileWorker

JOB_MS_MAX: Final = 15_000
WAITING_MAX: Final = 64
TEXT_CHARACTERS_MAX: Final = 1 << 20
REFERRED_CHARACTERS_MAX: Final = 2 << 20
HARMLESS_JOB: Final = b'{"job":"nothing"}'

JOB_BYTES_MAX: Final = 24 << 20
"""Bytes of a job; each character may take six of them."""

JOB_CHARACTERS_MAX: Final = 2 << 20
"""Characters of earlier versions in one job, one version at least."""


class SchemaText(NamedTuple):
    """A schema as the worker gets it: its format, its text, and name and text of the schemas that it refers to."""

    kind: str
    text: str
    references: Sequence[tuple[str, str]] = ()

    @property
    def characters(self) -> int:
        """Number of characters, those of its references included."""
        return len(self.text) + sum(len(text) for _, text in self.references)

    def fields(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "references": self.references}


class ParsedText(NamedTuple):
    """The text of a schema as it is stored, its identity, and the names of the records that it describes."""

    text: str
    identity: str
    names: Sequence[str] = ()


class SchemaChecks:
    """The checks of one broker. All methods run on its event loop. They raise the refusal 42201 for a schema that is
    not valid, too large, or ends the worker, and 50001 without the extra; `ThrottlingQuotaExceeded` if too many wait,
    `Unavailable` if there is no worker, and while the broker stops."""

    def __init__(self, worker: FileWorker | None) -> None:
        """`worker`: None to do the jobs in this process."""
        self._worker = worker
        self._waiting = 0
        self._is_closed = False

    def close(self) -> None:
        """Stop blaming schemas for what the worker does not answer: it is about to be closed."""
        self._is_closed = True

    async def parse(self, schema: SchemaText, *, normalize: bool) -> ParsedText:
        """Parse a schema."""
        if len(schema.text) > TEXT_CHARACTERS_MAX or schema.characters > REFERRED_CHARACTERS_MAX:
            raise refusals.invalid_schema(f"it has more than {TEXT_CHARACTERS_MAX} characters")
        answer = await self._run(
            {"job": "parse", "kind": schema.kind, "schema": schema.fields(), "normalize": normalize}
        )
        return ParsedText(answer["text"], answer["identity"], answer["names"])

    async def identities(
        self, kind: str, schemas: Sequence[SchemaText], *, normalize: bool
    ) -> list[str | None]:
        """Return the identities of schemas of one format, None for one that is not valid."""
        found: list[str | None] = []
        for part in _parts(schemas):
            fields = [each.fields() for each in part]
            answer = await self._run(
                {"job": "identities", "kind": kind, "schemas": fields, "normalize": normalize}
            )
            found += answer["identities"]
        return found

    async def incompatibilities(
        self, level: str, schema: SchemaText, earlier: Sequence[tuple[int, SchemaText]]
    ) -> list[str]:
        """Return why a schema is not compatible with earlier versions, each with its number; empty if it is. `level`:
        for each of the versions."""
        found: list[str] = []
        numbers = {id(text): number for number, text in earlier}
        for part in _parts([text for _, text in earlier]):
            fields = [{**each.fields(), "version": numbers[id(each)]} for each in part]
            answer = await self._run(
                {
                    "job": "check",
                    "level": level,
                    "kind": schema.kind,
                    "schema": schema.fields(),
                    "earlier": fields,
                }
            )
            found += answer["messages"]
        return found

    async def record_names(self, schema: SchemaText) -> list[str]:
        """Return the full names of the records that a schema describes: of an Avro type, of the messages of Protobuf,
        the title of a JSON Schema."""
        found: list[str] = (await self._run({"job": "names", "schema": schema.fields()}))["names"]
        return found

    async def serialized(self, schema: SchemaText) -> SchemaText:
        """Return a schema of Protobuf, and those that it refers to, as a `FileDescriptorProto` in base64 each."""
        answer = await self._run({"job": "serialize", "schema": schema.fields()})
        return SchemaText(schema.kind, answer["text"], [(name, text) for name, text in answer["references"]])

    async def encode(self, schema: SchemaText, values: Sequence[Any]) -> list[bytes]:
        """Return values of plain JSON as a schema encodes them, with the indexes of a message of Protobuf. Raises
        `InvalidRecord`, which names the value and the path in it."""
        answer = await self._run({"job": "encode", "schema": schema.fields(), "values": values})
        if "malformed" in answer:
            raise malformed_record("value", answer["malformed"], answer["reason"])
        return [b64decode(each) for each in answer["encoded"]]

    async def _run(self, task: dict[str, Any]) -> dict[str, Any]:
        job = json.dumps(task, ensure_ascii=False).encode("utf-8", "surrogatepass")
        if self._worker is None:
            return _checked(json.loads(run_job(job)))
        if len(job) > JOB_BYTES_MAX:
            raise refusals.invalid_schema(f"it is too large to be checked with others: {len(job)} bytes")
        if self._waiting >= WAITING_MAX:
            raise ThrottlingQuotaExceeded(
                f"{self._waiting} checks of schemas wait for this broker; try again"
            )
        self._waiting += 1
        try:
            return _checked(json.loads(await self._answer(job)))
        except RequestTimedOut as error:
            raise refusals.invalid_schema(f"it takes more than {JOB_MS_MAX // 1000} s to check it") from error
        finally:
            self._waiting -= 1

    async def _answer(self, job: bytes) -> bytes:
        """Return the answer of the worker. A job that ends two workers, while another job does not, is refused; if that
        fails, too, the worker is at fault."""
        assert self._worker is not None
        for _ in range(2):
            try:
                return await self._worker.run(lambda: FileJob(job, ()), timeout_ms=JOB_MS_MAX)
            except Unavailable as error:
                if self._is_closed:
                    raise
                reason = error.message
        await self._worker.run(lambda: FileJob(HARMLESS_JOB, ()), timeout_ms=JOB_MS_MAX)
        raise refusals.invalid_schema(f"it cannot be processed: {reason}")


def malformed_record(what: str, position: int, reason: str) -> InvalidRecord:
    """Return the error for the record, or value, at a position."""
    error = InvalidRecord(f"{what} {position}: {reason}")
    error.record_errors = ((position, reason),)
    return error


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "refused" in answer:
        raise refusals.invalid_schema(answer["refused"])
    if "unavailable" in answer:
        raise refusals.refusal(refusals.STORE_ERROR, answer["unavailable"])
    return answer


def _parts(schemas: Sequence[SchemaText]) -> Iterator[list[SchemaText]]:
    """Yield the schemas in parts that fit into one job."""
    part: list[SchemaText] = []
    characters = 0
    for each in schemas:
        if part and characters + each.characters > JOB_CHARACTERS_MAX:
            yield part
            part, characters = [], 0
        part.append(each)
        characters += each.characters
    if part:
        yield part
