"""OpenAPI 3.1 description of the HTTP API, and a page that shows it, made from the table of operations."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter

from mansio.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mansio.api.http.v1.operation import Operation

PREFIX: Final = "/v1"
_REFERENCE: Final = "#/components/schemas/{model}"
_PARAMETER: Final = re.compile(r"{(\w+)}")

_PROBLEM: Final = {
    "type": "object",
    "description": "RFC 9457 problem details. `title`: class in mansio.errors; `code`: Kafka's error code.",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "integer"},
        "retriable": {"type": "boolean"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"pointer": {"type": "string"}, "detail": {"type": "string"}},
            },
        },
    },
    "required": ["title", "status", "detail"],
}


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the description as a JSON value."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM}
    paths: dict[str, Any] = {}
    for operation in operations:
        entry: dict[str, Any] = {
            "operationId": operation.handler.__module__.rpartition(".")[2] + "_" + operation.handler.__name__,
            "summary": operation.summary,
            "tags": [operation.tag],
            "parameters": _parameters(operation),
            "responses": {
                str(operation.status): _response(operation, schemas),
                "default": {
                    "description": "Problem details",
                    "content": {
                        "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
                    },
                },
            },
        }
        if operation.description:
            entry["description"] = operation.description
        if operation.body is not None:
            schema = _schema(operation.body, schemas, "validation")
            entry["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        elif operation.takes_raw_body:
            entry["requestBody"] = {"content": {"application/octet-stream": {"schema": {}}}}
        paths.setdefault(PREFIX + operation.path, {})[operation.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mansio", "version": __version__, "description": "HTTP API of a Mansio broker."},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer", "minimum": 0} if name == "partition" else {"type": "string"},
        }
        for name in _PARAMETER.findall(operation.path)
    ]
    model = operation.query.model_json_schema()
    for name, schema in model.get("properties", {}).items():
        variants = [each for each in schema.pop("anyOf", ()) if each.get("type") != "null"]
        if variants:
            schema |= variants[0]
        if schema.get("default", 0) is None:
            del schema["default"]
        schema.pop("title", None)
        found.append(
            {"name": name, "in": "query", "required": name in model.get("required", ()), "schema": schema}
        )
    return found


def _response(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    if operation.result is None and operation.media_type == "application/json":
        return {"description": "Done"}
    schema = {} if operation.result is None else _schema(operation.result, schemas, "serialization")
    return {"description": "Result", "content": {operation.media_type: {"schema": schema}}}


def _schema(model: Any, schemas: dict[str, Any], mode: Any) -> dict[str, Any]:
    found = TypeAdapter(model).json_schema(ref_template=_REFERENCE, mode=mode)
    schemas |= found.pop("$defs", {})
    name = getattr(model, "__name__", "")
    if not name or name == "dict":
        return dict(found)
    schemas[name] = found
    return {"$ref": f"#/components/schemas/{name}"}


def page(operations: Sequence[Operation]) -> str:
    """Return an HTML page with all operations; it loads nothing from elsewhere."""
    rows = []
    tag = ""
    for operation in operations:
        if operation.tag != tag:
            tag = operation.tag
            rows.append(f"<tr><th colspan=3>{html.escape(tag)}</th></tr>")
        parameters = ", ".join(each["name"] for each in _parameters(operation) if each["in"] == "query")
        rows.append(
            f"<tr><td><code>{operation.method}</code></td>"
            f"<td><code>{html.escape(PREFIX + operation.path)}</code></td>"
            f"<td>{html.escape(operation.summary)}{' (' if parameters else ''}{html.escape(parameters)}"
            f"{')' if parameters else ''}</td></tr>"
        )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Mansio HTTP API</title>"
        "<style>body{font:15px sans-serif;margin:2em auto;max-width:60em}td,th{text-align:left;padding:.2em 1em .2em 0}"
        "th{padding-top:1em}</style><h1>Mansio HTTP API</h1>"
        f"<p>Version {__version__}. <a href=openapi.json>OpenAPI 3.1 description</a>.</p>"
        f"<table>{''.join(rows)}</table></html>"
    )
