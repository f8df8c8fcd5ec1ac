"""A minimal schema registry: the part of Confluent's HTTP API that the client uses, on a loopback port.

It checks no compatibility. A Protobuf schema is registered and returned as a serialized file descriptor in base64.
"""

from __future__ import annotations

import base64
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self


class RegistryServer:
    """A registry with the subjects that a test registers. Use it as a context manager; `url` is its address."""

    def __init__(self, user_info: str = "") -> None:
        self.requests: list[str] = []
        """Method, path and query of every request."""
        self.failures: list[int] = []
        """HTTP status codes of the next responses; 302 redirects to this server."""
        self._expected = f"Basic {base64.b64encode(user_info.encode()).decode()}" if user_info else ""
        self._schemas: list[dict[str, Any]] = []
        self._subjects: dict[str, list[int]] = {}
        self._deleted: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner._answer(self, None)

            def do_POST(self) -> None:
                owner._answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_arguments: Any) -> None:
                """No output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def register(
        self,
        subject: str,
        schema: Any,
        kind: str = "AVRO",
        references: Sequence[tuple[str, str, int]] = (),
    ) -> int:
        """Add a version of a subject, and return the id of its schema. `references`: (name, subject, version)."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        entry: dict[str, Any] = {"schema": text}
        if kind != "AVRO":
            entry["schemaType"] = kind
        if references:
            entry["references"] = [
                {"name": name, "subject": other, "version": version} for name, other, version in references
            ]
        with self._lock:
            if entry not in self._schemas:
                self._schemas.append(entry)
            schema_id = self._schemas.index(entry) + 1
            versions = self._subjects.setdefault(subject, [])
            if schema_id not in versions:
                versions.append(schema_id)
        return schema_id

    def delete_version(self, subject: str, version: int) -> None:
        """Delete a version softly: it is listed with `deleted=true` only."""
        self._deleted.add((subject, version))

    def _answer(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        self.requests.append(f"{request.command} {request.path}")
        if self.failures:
            code = self.failures.pop(0)
            self._send(request, code, {"error_code": code, "message": "injected"})
        elif self._expected and request.headers.get("Authorization") != self._expected:
            self._send(request, 401, {"error_code": 401, "message": "Unauthorized"})
        else:
            code, content = self._content(request.path, body)
            self._send(request, code, content)

    def _content(self, target: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(target)
        deleted = parse_qs(parts.query).get("deleted") == ["true"]
        path = [unquote(one) for one in parts.path.strip("/").split("/")]
        if path[:2] == ["schemas", "ids"]:
            number = int(path[2])
            if not 0 < number <= len(self._schemas):
                return 404, {"error_code": 40403, "message": "Schema not found"}
            return 200, {**self._schemas[number - 1], "guid": str(_guid(number))}
        if path[:2] == ["schemas", "guids"]:
            found = [one for one in range(1, len(self._schemas) + 1) if str(_guid(one)) == path[2]]
            if not found:
                return 404, {"error_code": 40403, "message": "Schema not found"}
            return 200, {**self._schemas[found[0] - 1], "guid": path[2]}
        subject = path[1]
        if body is not None and len(path) == 2:
            return self._looked_up(subject, body)
        if body is not None:
            references = [(one["name"], one["subject"], one["version"]) for one in body.get("references", ())]
            kind = body.get("schemaType", "AVRO")
            schema_id = self.register(subject, body["schema"], kind, references)
            return 200, {"id": schema_id, "guid": str(_guid(schema_id))}
        if subject not in self._subjects:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        ids = self._subjects[subject]
        versions = [
            number for number in range(1, len(ids) + 1) if deleted or (subject, number) not in self._deleted
        ]
        if len(path) == 3:
            return 200, versions
        version = versions[-1] if path[3] == "latest" else int(path[3])
        if version not in versions:
            return 404, {"error_code": 40402, "message": f"Version {version} not found."}
        schema_id = ids[version - 1]
        return 200, {
            "subject": subject,
            "version": version,
            "id": schema_id,
            "guid": str(_guid(schema_id)),
            **self._schemas[schema_id - 1],
        }

    def _looked_up(self, subject: str, body: Any) -> tuple[int, Any]:
        wanted = {name: one for name, one in body.items() if name != "schemaType" or one != "AVRO"}
        for version, schema_id in enumerate(self._subjects.get(subject, ()), 1):
            if self._schemas[schema_id - 1] == wanted:
                return 200, {"subject": subject, "version": version, "id": schema_id, **wanted}
        return 404, {"error_code": 40403, "message": "Schema not found"}

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, code: int, content: Any) -> None:
        data = json.dumps(content).encode()
        request.send_response(code)
        if code == 302:
            request.send_header("Location", "/subjects")
        request.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)


def _guid(schema_id: int) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_OID, str(schema_id))
