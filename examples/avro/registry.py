"""Schema registry for trying examples: a part of Confluent's HTTP API, in memory, on 127.0.0.1:8081.

    python examples/avro/registry.py

It checks no compatibility and forgets its schemas when it ends. In production use a registry that exists, such as
Confluent's, Karapace or Apicurio.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit

schemas: list[str] = []
subjects: dict[str, list[int]] = {}


class Registry(BaseHTTPRequestHandler):
    """Requests of the API. The id of a schema is its place in `schemas`, counted from 1."""

    def do_POST(self) -> None:
        """`POST /subjects/SUBJECT/versions`: register a schema."""
        schema = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["schema"]
        if schema not in schemas:
            schemas.append(schema)
        number = schemas.index(schema) + 1
        versions = subjects.setdefault(self.path.split("/")[2], [])
        if number not in versions:
            versions.append(number)
        self.answer(200, {"id": number})

    def do_GET(self) -> None:
        """`GET /schemas/ids/ID`, `/subjects/SUBJECT/versions` and `/subjects/SUBJECT/versions/VERSION`."""
        match urlsplit(self.path).path.strip("/").split("/"):
            case ["schemas", "ids", text] if text.isdecimal() and 0 < int(text) <= len(schemas):
                self.answer(200, {"schema": schemas[int(text) - 1]})
            case ["subjects", subject, "versions"] if subject in subjects:
                self.answer(200, list(range(1, len(subjects[subject]) + 1)))
            case ["subjects", subject, "versions", text] if subject in subjects:
                version = len(subjects[subject]) if text == "latest" else int(text)
                number = subjects[subject][version - 1]
                found = {"subject": subject, "version": version, "id": number, "schema": schemas[number - 1]}
                self.answer(200, found)
            case _:
                self.answer(404, {"error_code": 404, "message": f"{self.path} not found"})

    def answer(self, status: int, content: object) -> None:
        """Send a response."""
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: object) -> None:
        """No output for each request."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8081
    with HTTPServer(("127.0.0.1", port), Registry) as server:
        print(f"schema registry ready at http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
