"""A small Iceberg REST catalog over HTTP: the part of the protocol that Mansio uses, over a SQLite catalog.

For answers that get lost, and where there is no Java; `iceberg_server` has Iceberg's own. Here pyiceberg's SQLite
catalog keeps the tables and judges the commits, and this puts HTTP before it. Always true: requests are done one after
the other; `fail_next` makes the answer to the next commit an error, after or before it is done.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import CommitTableRequest

if TYPE_CHECKING:
    from pathlib import Path

    from pyiceberg.table.metadata import TableMetadata

STATUS_OF: dict[type[Exception], int] = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    TableAlreadyExistsError: 409,
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
}


class RestCatalog:
    """`with RestCatalog(directory) as catalog:` serves on `catalog.address`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.catalog = SqlCatalog(
            "kept", uri=f"sqlite:///{directory}/kept.db", warehouse=f"file://{directory}/warehouse"
        )
        self.fail_next: str | None = None
        """`before` or `after` the next commit is done."""
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"served": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.catalog.close()

    def answer(self, method: str, path: list[str], body: bytes) -> dict[str, Any]:
        """What a request comes to. Raises pyiceberg's exceptions."""
        match method, path:
            case "GET", ["config"]:
                return {"defaults": {}, "overrides": {}}
            case "POST", ["namespaces"]:
                namespace = json.loads(body)["namespace"]
                self.catalog.create_namespace(tuple(namespace))
                return {"namespace": namespace, "properties": {}}
            case "GET" | "HEAD", ["namespaces", namespace]:
                return {
                    "namespace": [namespace],
                    "properties": self.catalog.load_namespace_properties(namespace),
                }
            case "POST", ["namespaces", namespace, "tables"]:
                asked = CreateTableRequest.model_validate({"location": None, **json.loads(body)})
                given: dict[str, Any] = {
                    name: value
                    for name, value in (
                        ("partition_spec", asked.partition_spec),
                        ("sort_order", asked.write_order),
                    )
                    if value is not None
                }
                table = self.catalog.create_table(
                    (namespace, asked.name),
                    asked.table_schema,
                    location=asked.location,
                    properties=asked.properties,
                    **given,
                )
                return _described(table.metadata, table.metadata_location)
            case "GET" | "HEAD", ["namespaces", namespace, "tables", name]:
                table = self.catalog.load_table((namespace, name))
                return _described(table.metadata, table.metadata_location)
            case "POST", ["namespaces", namespace, "tables", name]:
                return self._commit(namespace, name, CommitTableRequest.model_validate_json(body))
        raise NotImplementedError(f"{method} {path}")

    def _commit(self, namespace: str, name: str, asked: CommitTableRequest) -> dict[str, Any]:
        failing, self.fail_next = self.fail_next, None
        if failing == "before":
            raise RuntimeError("failed before it was done")
        table = self.catalog.load_table((namespace, name))
        done = self.catalog.commit_table(table, asked.requirements, asked.updates)
        if failing == "after":
            raise RuntimeError("failed after it was done")
        return _described(done.metadata, done.metadata_location)


def _described(metadata: TableMetadata, location: str) -> dict[str, Any]:
    return {"metadata-location": location, "metadata": json.loads(metadata.model_dump_json()), "config": {}}


class _Handler(BaseHTTPRequestHandler):
    served: RestCatalog
    protocol_version = "HTTP/1.1"

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        path = urlsplit(self.path).path.removeprefix("/v1/").split("/")
        try:
            with self.served.lock:
                status, answer = 200, self.served.answer(self.command, path, body)
        except Exception as error:  # noqa: BLE001  # an answer of its own
            status = STATUS_OF.get(type(error), 500)
            answer = {"error": {"message": str(error), "type": type(error).__name__, "code": status}}
        data = b"" if self.command == "HEAD" else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_HEAD = _do  # noqa: N815  # as the library calls them

    def log_message(self, *_: object) -> None:
        """It is not read."""
