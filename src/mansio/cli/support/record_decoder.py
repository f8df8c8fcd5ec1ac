"""Decoding of the keys and values that a command prints, with the schemas of a registry.

Invariants:
* A record that cannot be decoded is printed as it is, with a line on standard error; the exit code is 1 then. A key
  that names no schema is no error: keys often are plain text.
* An error of the registry ends the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mansio.cli.support.common import print_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mansio.cli.support.formatting import RecordPrinter
    from mansio.client import Client
    from mansio.client.types import Message
    from mansio.serde import Serde


BROKERS: Final = "brokers"
"""Stands for the registry of the brokers that a command is connected to."""


class RecordDecoder:
    """Decodes records. `exit_code`: 1 if a record could not be decoded."""

    exit_code = 0

    def __init__(self, registry: str) -> None:
        """`registry`: the address of a registry, or `BROKERS`. Raises `ConfigError`."""
        from mansio.serde import Serde

        self._serde: Serde | None = None if registry == BROKERS else Serde(registry)

    def connect(self, client: Client) -> None:
        """Use the registry of the brokers of a client, unless there is another one."""
        from mansio.serde import Serde

        if self._serde is None:
            self._serde = Serde(client.admin.schemas.source)

    async def show(self, printer: RecordPrinter, messages: Sequence[Message]) -> None:
        """Print records with their decoded keys and values. Raises `SchemaRegistryError`."""
        printer.show_decoded(messages, [await self._decoded(one) for one in messages])

    async def _decoded(self, message: Message) -> dict[str, Any]:
        from mansio.serde import MalformedValue, NotFramed, SchemaNotFound, UnsupportedSchema

        assert self._serde is not None, "connected"
        found: dict[str, Any] = {}
        parts: Iterable[tuple[str, bytes | None]] = (("key", message.key), ("value", message.value))
        for name, data in parts:
            if data is None:
                continue
            try:
                found[name] = await self._serde.decode(
                    message.topic, data, message.headers, is_key=name == "key", as_json=True
                )
            except (MalformedValue, SchemaNotFound, UnsupportedSchema) as error:
                if name == "value" or not isinstance(error, NotFramed):
                    where = f"{message.topic}-{message.partition}, offset {message.offset}"
                    self.exit_code = print_error(f"the {name} of {where} is not decoded: {error.message}")
        return found
