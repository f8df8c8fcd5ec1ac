"""The `Serde` for programs without an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from mansio.net.blocking import LoopThread
from mansio.serde.serde import EncodedValue, Serde
from mansio.serde.subjects import SubjectNames

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from mansio.serde.definition import SchemaDefinition
    from mansio.serde.http_registry import RegistryCredentials
    from mansio.serde.source import SchemaSource


class BlockingSerde:
    """The API of `Serde`, blocking. It has an event loop in a thread of its own, and may be shared between threads."""

    def __init__(
        self,
        source: str | SchemaSource,
        *,
        credentials: RegistryCredentials | None = None,
        subject_names: SubjectNames = SubjectNames.TOPIC,
        auto_register: bool = True,
    ) -> None:
        """Parameters and errors are those of `Serde`."""
        self._serde = Serde(
            source, credentials=credentials, subject_names=subject_names, auto_register=auto_register
        )
        self._thread = LoopThread("mansio-serde")
        self._end = self._thread.close_when_dropped(self._serde.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the requests that are under way, and the thread."""
        self._end()

    def encode(
        self,
        topic: str,
        value: Any,
        *,
        is_key: bool = False,
        schema: Literal["latest"] | int | SchemaDefinition = "latest",
        subject: str | None = None,
        message: str = "",
        is_json: bool = False,
    ) -> bytes | None:
        """Return a key or value as bytes, as `Serde.encode`."""
        return self._thread.run(
            self._serde.encode(
                topic, value, is_key=is_key, schema=schema, subject=subject, message=message, is_json=is_json
            )
        )

    def encode_with_headers(
        self,
        topic: str,
        value: Any,
        *,
        is_key: bool = False,
        schema: Literal["latest"] | int | SchemaDefinition = "latest",
        subject: str | None = None,
        message: str = "",
        is_json: bool = False,
    ) -> EncodedValue:
        """Return a key or value as bytes without a frame, and its header, as `Serde.encode_with_headers`."""
        return self._thread.run(
            self._serde.encode_with_headers(
                topic, value, is_key=is_key, schema=schema, subject=subject, message=message, is_json=is_json
            )
        )

    def decode(
        self,
        topic: str,
        data: bytes | None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        *,
        is_key: bool = False,
        reader: Literal["latest"] | int | SchemaDefinition | None = None,
        as_json: bool = False,
    ) -> Any:
        """Return the value of a key or value, as `Serde.decode`."""
        return self._thread.run(
            self._serde.decode(topic, data, headers, is_key=is_key, reader=reader, as_json=as_json)
        )
