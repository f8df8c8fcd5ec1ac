"""Operations of the HTTP API: one table from which the routes and the OpenAPI description are made.

An operation names its method, path, parameters, body and result by pydantic models. A handler gets a `Call` with the
decoded parameters and body, calls services, directly or through a client that acts for the caller, and returns the
result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from mansio.api.asgi.bodies import read_body
from mansio.api.asgi.json_bodies import PART_BYTES, PIECE_BYTES, VALUE_BYTES_MAX, check_keys, count_values
from mansio.api.asgi.problems import InvalidField, from_validation, http_problem, problem
from mansio.api.asgi.request_guard import check_form_body, check_host_and_origin
from mansio.api.http.authentication import session_of_request
from mansio.api.request_budget import RequestBudget, TooManyRequests
from mansio.broker.routing.caller import CLIENT_ID_CHARACTERS_MAX, Caller, check_client_id, on_listener
from mansio.errors import InvalidTopic, MansioError, MessageTooLarge, Unavailable
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from mansio.api.http.broker_stats import RunningBroker
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.statistics import LoopHolds
    from mansio.client import Client
    from mansio.config.settings import Settings

T = TypeVar("T")

HTTP_CLIENT_ID: Final = "mansio-http"
"""Client id of requests without the headers `Mansio-Client-Id` and `User-Agent`."""

STREAMS_MAX: Final = 32
"""Maximum number of streams of a broker: of events and of found records."""

CLIENT_ID_HEADER: Final = "mansio-client-id"


class Body(BaseModel):
    """Base of bodies and parameters: a member that is not known is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Result(Body):
    """Base of results. `model_validate` makes one from the value that a service or the client returns: an object with
    attributes of the same names, as far as `validation_alias` names no other one."""

    model_config = ConfigDict(from_attributes=True)


class NoParameters(Body):
    """No query parameters."""


class ApiContext:
    """What the operations of one broker share: its services, and the memory of bodies."""

    def __init__(self, running: Callable[[], RunningBroker | None], settings: Settings) -> None:
        self._running = running
        self.host_names = settings.http_names
        self.budget = RequestBudget()
        self._streams = 0

    def reserve_stream(self) -> None:
        """Count a stream of events or found records; `release_stream` at its end. Raises `TooManyRequests`."""
        if self._streams >= STREAMS_MAX:
            raise TooManyRequests(f"{STREAMS_MAX} streams are open")
        self._streams += 1

    def release_stream(self) -> None:
        """Count the end of a stream."""
        self._streams -= 1

    @property
    def broker(self) -> RunningBroker:
        """The broker. Raises `Unavailable` while it starts or stops."""
        broker = self._running()
        if broker is None or not broker.is_ready():
            raise Unavailable("the broker is starting or stopping")
        return broker

    @property
    def services(self) -> BrokerServices:
        return self.broker.services

    def loop_holds(self) -> LoopHolds | None:
        """Return the holds of the event loop by requests, None before the broker has started."""
        broker = self._running()
        return None if broker is None else broker.services.statistics.holds


@dataclass(slots=True)
class Call:
    """One request. `query` and `body`: of the types of the operation; `data`: the raw body. `body` is None where the
    operation parses a large one itself."""

    context: ApiContext
    request: Request
    query: Any
    body: Any
    data: bytes

    @property
    def services(self) -> BrokerServices:
        return self.context.services

    @property
    def client(self) -> Client:
        """A new client that acts for the caller. Operations for which this broker may not be the right one use it."""
        return self.context.broker.clients.client(self.caller)

    def path(self, name: str) -> str:
        """Return a part of the path."""
        return str(self.request.path_params[name])

    @property
    def topic(self) -> str:
        return self.path("topic")

    @property
    def partition(self) -> TopicPartition:
        """The partition in the path. Raises `InvalidField`."""
        text = self.path("partition")
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise InvalidField("partition", f"{text[:40]!r} is not the number of a partition")
        return TopicPartition(self.topic, int(text))

    @property
    def offset(self) -> int:
        """The offset in the path. Raises `InvalidField`."""
        text = self.path("offset")
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise InvalidField("offset", f"{text[:40]!r} is not an offset")
        return int(text)

    @property
    def caller(self) -> Caller:
        address = self.request.client
        headers = self.request.headers
        client_id = headers.get(CLIENT_ID_HEADER)
        if client_id is None:
            client_id = headers.get("user-agent", HTTP_CLIENT_ID)[:CLIENT_ID_CHARACTERS_MAX]
        check_client_id(client_id)
        return Caller(
            on_listener(session_of_request(self.request), "http"),
            client_id,
            "" if address is None else address.host,
        )


@dataclass(frozen=True, slots=True)
class Operation:
    """One method on one path. `query`: model of the parameters; `body`: type of the JSON body, None for none or, with
    `takes_raw_body`, for bytes; `result`: type of the JSON result, None for none. `media_type`: of another result.
    `parses_large`: the handler parses a body of more than `PART_BYTES`, and finds repeated keys in each."""

    method: str
    path: str
    summary: str
    handler: Callable[[Call], Awaitable[Any]]
    query: type[Body] = NoParameters
    body: Any = None
    result: Any = None
    status: int = 200
    takes_raw_body: bool = False
    parses_large: bool = False
    media_type: str = "application/json"
    tag: str = ""
    description: str = ""
    adapter: TypeAdapter[Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.body is not None:
            object.__setattr__(self, "adapter", TypeAdapter(self.body))

    async def __call__(self, context: ApiContext, request: Request) -> Response:
        """Decode the request, call the handler, encode its result or error."""
        try:
            check_host_and_origin(request, context.host_names)
            check_form_body(request)
            query = _parse_query(self.query, request)
            async with read_body(request, context.budget) as data:
                body = await self._parse_body(context, request, data)
                result = await self.handler(Call(context, request, query, body, data))
        except MansioError as error:
            return problem(error)
        except HTTPException as error:
            return http_problem(error)
        except ClientDisconnect:
            return Response(status_code=499)  # its client is gone
        except TimeoutError:
            return problem(
                Unavailable("no answer in time: it is not known whether the request had an effect")
            )
        if isinstance(result, Response):
            return result
        if result is None:
            return Response(status_code=204)
        return Response(to_json(result, by_alias=True), self.status, media_type="application/json")

    async def _parse_body(self, context: ApiContext, request: Request, data: bytes) -> Any:
        if self.adapter is None:
            if data and not self.takes_raw_body:
                raise InvalidField("", "this request has no body")
            return None
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise HTTPException(
                415, f"the body is JSON: send Content-Type: application/json, not {kind[:60]!r}"
            )
        if self.parses_large and len(data) > PART_BYTES:
            return None
        if len(data) > PIECE_BYTES:
            if len(data) > VALUE_BYTES_MAX:
                raise MessageTooLarge(f"this body has at most {VALUE_BYTES_MAX} bytes, not {len(data)}")
            async with context.budget.turns as turns:
                await count_values(data, turns)
        found = validated(self.adapter, data)
        if not self.parses_large:
            check_keys(data)
        return found


def validated(adapter: TypeAdapter[Any], data: bytes) -> Any:
    """Parse and validate a JSON text. Raises `InvalidField`."""
    try:
        return adapter.validate_json(data, strict=True)  # true and "1" are no numbers
    except ValidationError as error:
        raise from_validation(error) from error


def _parse_query(model: type[Body], request: Request) -> Body:
    pairs = request.query_params.multi_items()
    given = dict(pairs)
    if len(given) < len(pairs):
        raise InvalidField("query", "a parameter occurs twice")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        found = from_validation(error)
        raise InvalidField(
            *_parameter(found.fields[0]), [_parameter(each) for each in found.fields[1:]]
        ) from error


def _parameter(found: tuple[str, str]) -> tuple[str, str]:
    return found[0].lstrip("/"), found[1]


def check_topic_name(name: str) -> str:
    """Return the name of a topic. Raises `InvalidTopic` for one that cannot exist."""
    if not 1 <= len(name) <= 249:
        raise InvalidTopic("the name of a topic has 1 to 249 characters")
    return name
