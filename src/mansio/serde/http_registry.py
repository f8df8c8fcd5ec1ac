"""Client of a schema registry with Confluent's HTTP API, version 1.

>>> registry = SchemaRegistry("http://127.0.0.1:8081")
>>> registry.latest_version("orders-value").schema_id

Credentials (HTTP basic authentication) come from `RegistryCredentials` or from the environment variables
`MANSIO_SCHEMA_REGISTRY_USER` and `MANSIO_SCHEMA_REGISTRY_PASSWORD`; an address that contains them is refused, because
Spark shows options in its plans. They are sent over https, or to this machine: otherwise the network could read them.

Invariants:
* Responses about an id, a GUID or a version are cached, because they never change; the caches are bounded. "Not found"
  is cached for `NOT_FOUND_S`, so that malformed values do not each cost a request.
* A request has a timeout, and its response a maximum size. Connection errors, 429 and 5xx are retried with a growing
  pause, at most `ATTEMPTS_MAX` times in all. Redirects are not followed: they would take the credentials elsewhere.
* No error and no `repr` contains the credentials.
"""

from __future__ import annotations

import base64
import json
import os
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final

from mansio.config.addresses import is_loopback_host
from mansio.errors import ConfigError
from mansio.serde.definition import ReferencedSchema, SchemaType
from mansio.serde.errors import SchemaNotFound, SchemaRegistryError
from mansio.serde.source import RegisteredSchema, SubjectVersion
from mansio.tracebacks import without_traceback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.serde.definition import SchemaDefinition
    from mansio.state.registry.schema import SchemaReference

USER_VARIABLE: Final = "MANSIO_SCHEMA_REGISTRY_USER"
PASSWORD_VARIABLE: Final = "MANSIO_SCHEMA_REGISTRY_PASSWORD"  # noqa: S105  # a name

TIMEOUT_S: Final = 10.0
ATTEMPTS_MAX: Final = 4
RETRY_PAUSE_S: Final = 0.2
RESPONSE_BYTES_MAX: Final = 16 << 20
CACHE_ENTRIES_MAX: Final = 2_000
REFERENCES_MAX: Final = 100
"""Maximum number of schemas that one schema refers to, directly or not."""
NOT_FOUND_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class RegistryCredentials:
    """User name and password of a schema registry."""

    user: str
    password: str = field(repr=False)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> RegistryCredentials | None:
        """Return the credentials of the environment variables; None without `MANSIO_SCHEMA_REGISTRY_USER`."""
        found = os.environ if variables is None else variables
        user = found.get(USER_VARIABLE)
        return cls(user, found.get(PASSWORD_VARIABLE, "")) if user else None


class SchemaRegistry:
    """A client of one schema registry. It may be used by several threads, and pickled; a copy has an empty cache."""

    def __init__(self, url: str, credentials: RegistryCredentials | None = None) -> None:
        """`credentials`: by default those of the environment. Raises `ConfigError` for an invalid address, and for one
        to which they would be sent unencrypted."""
        self.url = checked_url(url)
        self._credentials = credentials or RegistryCredentials.from_environment()
        if self._credentials is not None:
            _check_confidentiality(self.url)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, Any] = OrderedDict()
        self._not_found: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_credentials": self._credentials}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"SchemaRegistry({self.url!r})"

    def schema_by_id(self, schema_id: int) -> RegisteredSchema:
        """Return the schema with this id. Raises `SchemaNotFound`, `SchemaRegistryError`."""
        return self._schema(self._get(f"/schemas/ids/{schema_id}?format=serialized"), schema_id)

    def schema_by_guid(self, guid: uuid.UUID) -> RegisteredSchema:
        """Return the schema with this GUID. Raises `SchemaNotFound`, `SchemaRegistryError`."""
        found = self._schema(self._get(f"/schemas/guids/{guid}?format=serialized"))
        return found if found.guid is not None else replace(found, guid=guid)

    def versions(self, subject: str) -> list[int]:
        """All versions of a subject, also deleted ones (values may still have them), in order. Not cached.

        Raises `SchemaNotFound`, `SchemaRegistryError`.
        """
        found = self._request("GET", f"/subjects/{_escaped(subject)}/versions?deleted=true")
        if not isinstance(found, list) or not all(isinstance(one, int) for one in found):
            raise self._unexpected(found)
        return sorted(found)

    def version(self, subject: str, version: int) -> SubjectVersion:
        """Return a version of a subject. Raises `SchemaNotFound`, `SchemaRegistryError`."""
        path = f"/subjects/{_escaped(subject)}/versions/{version}?format=serialized&deleted=true"
        return self._subject_version(self._get(path))

    def latest_version(self, subject: str) -> SubjectVersion:
        """Return the latest version of a subject. Not cached. Raises `SchemaNotFound`, `SchemaRegistryError`."""
        return self._subject_version(
            self._request("GET", f"/subjects/{_escaped(subject)}/versions/latest?format=serialized")
        )

    def register(
        self,
        subject: str,
        text: str,
        kind: SchemaType = SchemaType.AVRO,
        references: Sequence[SchemaReference] = (),
    ) -> int:
        """Return the id of a schema in a subject. If the subject does not have it, the registry adds it as a new
        version.

        Raises `SchemaRegistryError`, also if the schema is incompatible with the subject's earlier versions.
        """
        body = _schema_body(text, kind, references)
        return self._id(self._request("POST", f"/subjects/{_escaped(subject)}/versions", body))

    def look_up(self, subject: str, definition: SchemaDefinition) -> int:
        """Return the id of a schema that the subject has. Raises `SchemaNotFound`, `SchemaRegistryError`."""
        body = _schema_body(definition.text, definition.kind, definition.references)
        return self._id(self._request("POST", f"/subjects/{_escaped(subject)}", body))

    def _id(self, found: Any) -> int:
        if not isinstance(found, dict) or not isinstance(found.get("id"), int):
            raise self._unexpected(found)
        return int(found["id"])

    def _subject_version(self, found: Any) -> SubjectVersion:
        try:
            schema_id = int(found["id"])
            return SubjectVersion(
                str(found["subject"]), int(found["version"]), schema_id, self._schema(found, schema_id)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._unexpected(found) from error

    def _schema(self, found: Any, schema_id: int | None = None) -> RegisteredSchema:
        references: dict[tuple[str, str, int], ReferencedSchema] = {}
        self._add_references(found, references, depth=0)
        if not isinstance(found, dict) or not isinstance(found.get("schema"), str):
            raise self._unexpected(found)
        try:
            kind = SchemaType(found.get("schemaType") or SchemaType.AVRO)
            guid = uuid.UUID(found["guid"]) if found.get("guid") else None
            if schema_id is None and found.get("id") is not None:
                schema_id = int(found["id"])
        except (TypeError, ValueError, AttributeError) as error:
            raise self._unexpected(found) from error
        return RegisteredSchema(kind, found["schema"], tuple(references.values()), schema_id, guid)

    def _add_references(
        self, found: Any, schemas: dict[tuple[str, str, int], ReferencedSchema], depth: int
    ) -> None:
        """Add the referenced schemas, each after its own references."""
        references = found.get("references") if isinstance(found, dict) else None
        for one in references or ():
            try:
                name, subject, version = str(one["name"]), str(one["subject"]), int(one["version"])
            except (KeyError, TypeError, ValueError) as error:
                raise self._unexpected(found) from error
            if (name, subject, version) in schemas:
                continue
            if len(schemas) >= REFERENCES_MAX or depth >= REFERENCES_MAX:
                raise SchemaRegistryError(
                    f"a schema of {self.url} refers to more than {REFERENCES_MAX} others"
                )
            path = f"/subjects/{_escaped(subject)}/versions/{version}?format=serialized&deleted=true"
            inner = self._get(path)
            self._add_references(inner, schemas, depth + 1)
            if not isinstance(inner, dict) or not isinstance(inner.get("schema"), str):
                raise self._unexpected(inner)
            schemas[name, subject, version] = ReferencedSchema(name, inner["schema"])

    # -- requests --------

    def _get(self, path: str) -> Any:
        """Return a response that never changes, from the cache if it has it."""
        with self._lock:
            if path in self._cache:
                self._cache.move_to_end(path)
                return self._cache[path]
            missed = self._not_found.get(path)
        if missed is not None and time.monotonic() - missed[0] < NOT_FOUND_S:
            raise SchemaNotFound(missed[1])
        try:
            found = self._request("GET", path)
        except SchemaNotFound as error:
            with self._lock:
                self._not_found[path] = (time.monotonic(), error.message)
                while len(self._not_found) > CACHE_ENTRIES_MAX:
                    self._not_found.popitem(last=False)
            raise
        with self._lock:
            self._cache[path] = found
            while len(self._cache) > CACHE_ENTRIES_MAX:
                self._cache.popitem(last=False)
        return found

    def _request(self, method: str, path: str, body: Any = None) -> Any:
        problem = ""
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                time.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                with _OPENER.open(self._prepared(method, path, body), timeout=TIMEOUT_S) as response:
                    content = response.read(RESPONSE_BYTES_MAX + 1)
                if len(content) > RESPONSE_BYTES_MAX:
                    raise SchemaRegistryError(
                        f"the schema registry {self.url} sends more than {RESPONSE_BYTES_MAX} bytes for {path}"
                    )
                return json.loads(content)
            except urllib.error.HTTPError as error:
                with error:
                    problem = _problem(error)
                if error.code == 404:
                    raise SchemaNotFound(f"the schema registry {self.url} has no {path}: {problem}") from None
                if error.code in (401, 403):
                    raise SchemaRegistryError(
                        f"the schema registry {self.url} refuses the request ({problem}): set {USER_VARIABLE} and"
                        f" {PASSWORD_VARIABLE}"
                    ) from None
                if error.code != 429 and error.code < 500:
                    raise SchemaRegistryError(
                        f"the schema registry {self.url} refuses {path}: {problem}"
                    ) from None
            except (OSError, HTTPException) as error:
                cause = error.reason if isinstance(error, urllib.error.URLError) else without_traceback(error)
                problem = f"{type(cause).__name__}: {cause}"
            except ValueError as error:
                raise SchemaRegistryError(
                    f"the schema registry {self.url} sends no JSON for {path}"
                ) from error
        raise SchemaRegistryError(
            f"the schema registry {self.url} does not answer, after {ATTEMPTS_MAX} attempts: {problem}"
        )

    def _prepared(self, method: str, path: str, body: Any) -> urllib.request.Request:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)  # noqa: S310  # http(s) is checked
        request.add_header("Accept", "application/vnd.schemaregistry.v1+json, application/json")
        if data is not None:
            request.add_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        if self._credentials is not None:
            pair = f"{self._credentials.user}:{self._credentials.password}".encode()
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair).decode()}")
        return request

    def _unexpected(self, found: Any) -> SchemaRegistryError:
        return SchemaRegistryError(
            f"the schema registry {self.url} has answered {str(found)[:80]!r}, which is not of its API"
        )


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that turns a redirect into an error."""

    def redirect_request(self, *_arguments: Any) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(_NoRedirects)


def checked_url(url: str) -> str:
    """Return the address without a slash at its end. Raises `ConfigError` if it is none, or contains credentials."""
    parts = urllib.parse.urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError("the address of a schema registry is http(s)://host:port")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "the address of a schema registry must not contain credentials, because plans show it: set"
            f" {USER_VARIABLE} and {PASSWORD_VARIABLE}"
        )
    return url.strip().rstrip("/")


def _check_confidentiality(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "http" and not is_loopback_host(parts.hostname or ""):
        raise ConfigError(
            f"the schema registry {url} would get user and password unencrypted: use https, or unset {USER_VARIABLE}"
        )


def _problem(error: urllib.error.HTTPError) -> str:
    try:
        found = json.loads(error.read(10_000))
        text = str(found["message"])
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        text = ""
    return f"{error.code} {' '.join(text.split())[:200] or error.reason}"


def _schema_body(text: str, kind: SchemaType, references: Sequence[SchemaReference]) -> dict[str, Any]:
    """Return the body of a request that has a schema. Registries before Confluent's 5.5 know Avro only, without a
    type."""
    body: dict[str, Any] = {"schema": text}
    if kind != SchemaType.AVRO:
        body["schemaType"] = kind
    if references:
        body["references"] = [one._asdict() for one in references]
    return body


def _escaped(subject: str) -> str:
    return urllib.parse.quote(subject, safe="")
