"""ASGI application of the SQS endpoint: chooses the protocol, checks the signature, calls the action.

Without `secrets_key_file` and `sqs_access_keys_file` every credential is accepted. With them requests are signed with
the access key of a user, who is the user of the request, or with one of the file, whose id is the user. Requests that a
web page of another site can send are refused: by their Host, Origin and method.

Invariants:
* Where requests are signed, the body of one is read only if its head has a signature with a present date.
* A request with an unknown access key gets the answer of a wrong signature, at the same point and after the same work;
  its body is dropped as it is read, and takes no memory.
* A receive that waits ends when the access key of its client, or its user, is deleted.
* No request is begun with a certificate that has expired or was revoked meanwhile, nor, where requests are signed,
  while this broker is cut off from its cluster for too long to know its users and their rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import uuid
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from mansio.api.asgi.bodies import drop_body, read_body
from mansio.api.asgi.connection import CLIENT_CERTIFICATE
from mansio.api.asgi.json_bodies import PIECE_BYTES, count_values
from mansio.api.asgi.problems import InvalidField
from mansio.api.asgi.request_guard import check_host_and_origin, check_image_request
from mansio.api.asgi.request_label import request_label
from mansio.api.client_certificates import checked_expiry_ms
from mansio.api.request_budget import RequestBudget
from mansio.api.sqs import query_protocol
from mansio.api.sqs.actions import ACCESS_DENIED, BATCH_MAX, Actions, Invocation, error_code
from mansio.api.sqs.queues.queue_errors import (
    BatchRequestTooLong,
    InvalidParameterValue,
    QueueError,
    TooManyEntriesInBatchRequest,
    UnsupportedOperation,
)
from mansio.api.sqs.queues.queue_service import QueueService
from mansio.api.sqs.shapes import REQUESTS, checked
from mansio.api.sqs.signature import (
    Authorization,
    SignatureDoesNotMatch,
    SignedRequest,
    check_head,
    check_signature,
    join_headers,
    read_access_keys,
)
from mansio.broker.routing.caller import ANONYMOUS_SESSION, Caller, ClientSession, on_listener
from mansio.broker.services.log_ins import CUT_OFF
from mansio.errors import MansioError, SaslAuthenticationFailed, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from starlette.requests import Request

    from mansio.api.routing.routed_clients import RoutedClients
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.config.settings import Settings
    from mansio.state.authentication.revocation import RevocationLists

SQS_CLIENT_ID: Final = "mansio-sqs"
"""Client id of requests without an access key."""

TARGET_PREFIX: Final = "AmazonSQS."
JSON_TYPE: Final = "application/x-amz-json-1.0"
XML_TYPE: Final = "text/xml"
BODY_BYTES_MAX: Final = 4 << 20
"""Maximum size of a body: a message of 1 MiB takes three times as much where each of its bytes is escaped."""

JSON_VALUES_MAX: Final = 20_000
"""Maximum number of JSON values in a large body. Ten messages with all attributes have about a thousand."""

_BATCH: Final = "Batch"
_RECEIVE: Final = "ReceiveMessage"
_SUBSTITUTE_BYTES: Final = 30
_FORM_ACTION: Final = re.compile(rb"(?:^|&)Action=([A-Za-z]{1,64})")
_ACCESS_KEY: Final = re.compile(r"Credential=([^/,\s]{1,128})/")


class SqsEndpoint:
    """The SQS endpoint of one broker."""

    def __init__(
        self,
        services: BrokerServices,
        settings: Settings,
        clients: RoutedClients,
        revocations: Callable[[], RevocationLists | None] = lambda: None,
    ) -> None:
        """`revocations`: returns the revocation lists of certificates."""
        self._actions = Actions(QueueService(services, clients), services.clock, services.users.has_key)
        self._clock = services.clock
        self._holds = services.statistics.holds
        self._log_ins = services.log_ins
        self._revocations = revocations
        self._access_keys = services.sqs_access_keys
        self._is_signed = settings.has_sqs_access_keys
        self._keys_of_file = read_access_keys(settings.sqs_access_keys_file)
        self._substitute = secrets.token_urlsafe(_SUBSTITUTE_BYTES)
        self._host_names = settings.http_names
        self._budget = RequestBudget()
        self.app = Starlette(
            routes=[Route("/{path:path}", self._measured, methods=["GET", "POST"])], lifespan=self._lifespan
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._actions.close()

    async def _measured(self, request: Request) -> Response:
        return await self._holds.measured(
            partial(self._answer, request), "sqs", partial(request_label, request)
        )

    async def _answer(self, request: Request) -> Response:
        target = request.headers.get("x-amz-target", "")
        is_json = bool(target) or request.headers.get("content-type", "").startswith(JSON_TYPE)
        request_id = str(uuid.uuid4())
        try:
            check_host_and_origin(request, self._host_names)
            check_image_request(request)
            self._check_certificate(request)
            signer = self._signer(request)
            if signer is not None and signer.session is None:
                signer.check(request, await drop_body(request))
            async with read_body(request, self._budget) as body:
                is_long = len(body) > PIECE_BYTES
                if signer is not None:
                    hashed = await asyncio.to_thread(_sha256, body) if is_long else _sha256(body)
                    signer.check(request, hashed)
                if is_long:
                    is_batch = (target if is_json else _form_action(body)).endswith(_BATCH)
                    await self._check_large(body, is_json=is_json, is_batch=is_batch)
                if is_json:
                    action, parameters = _decode(request, target, body)
                elif is_long:  # a form is decoded byte by byte
                    action, parameters = await asyncio.to_thread(_decode_query, request, body)
                else:
                    action, parameters = _decode_query(request, body)
                result = await self._call(request, action, parameters, signer)
        except MansioError as error:
            return _error_response(error, request_id, is_json=is_json)
        except ClientDisconnect:
            return Response(status_code=499)  # its client is gone
        except TimeoutError:
            unknown = Unavailable("no answer in time: it is not known whether the request had an effect")
            return _error_response(unknown, request_id, is_json=is_json)
        headers = {"x-amzn-requestid": request_id}
        if is_json:
            return Response(json.dumps(result), headers=headers, media_type=JSON_TYPE)
        return Response(
            query_protocol.encode_result(action, result, request_id), headers=headers, media_type=XML_TYPE
        )

    async def _check_large(self, body: bytes, *, is_json: bool, is_batch: bool) -> None:
        """Check a large body before anything is built from it. Raises `TooManyEntriesInBatchRequest`,
        `BatchRequestTooLong`, `InvalidParameterValue`."""
        beginning = body[:BODY_BYTES_MAX]
        try:
            if is_json:
                async with self._budget.turns as turns:
                    await count_values(beginning, turns, JSON_VALUES_MAX)
            elif beginning.count(b"&") >= query_protocol.PARAMETERS_MAX:
                raise InvalidField("", f"the body has more than {query_protocol.PARAMETERS_MAX} parameters")
        except InvalidField as error:
            if is_batch:
                raise TooManyEntriesInBatchRequest(
                    f"Maximum number of entries per request are {BATCH_MAX}. You have sent more."
                ) from error
            raise InvalidParameterValue(error.message) from error
        if len(body) > BODY_BYTES_MAX:
            message = f"The request has more than {BODY_BYTES_MAX} bytes."
            raise BatchRequestTooLong(message) if is_batch else InvalidParameterValue(message)

    async def _call(
        self,
        request: Request,
        action: str,
        parameters: Mapping[str, Any],
        signer: Signer | None,
    ) -> dict[str, Any]:
        address = request.client
        session, access_key = ANONYMOUS_SESSION, _stated_access_key(request)
        if signer is not None and signer.session is not None:
            session, access_key = signer.session, signer.authorization.access_key
        caller = Caller(
            on_listener(session, "sqs"),
            client_id=access_key or SQS_CLIENT_ID,
            address="" if address is None else address.host,
        )
        base_url = f"{request.url.scheme}://{request.headers['host']}"
        disconnected = asyncio.ensure_future(request.receive())  # the body is read: it can only be the end
        has_ended = False

        def end(client: ClientSession | None) -> None:
            nonlocal has_ended
            if client is None:
                has_ended = True
                disconnected.cancel()

        unwatch = self._log_ins.watch(session, end) if session.credential_id else None
        try:
            if session.credential_id and self._access_keys.find(session.credential_id) is None:
                raise SignatureDoesNotMatch  # deleted while the body arrived
            call = Invocation(action, parameters, base_url, access_key, caller, disconnected)
            result = await self._actions.by_name[action](call)
        finally:
            disconnected.cancel()
            if unwatch is not None:
                unwatch()
        if has_ended and action == _RECEIVE:
            raise SignatureDoesNotMatch
        return result

    def _check_certificate(self, request: Request) -> None:
        """Check the certificate of the client, if it has presented one. Raises `CertificateRefused`."""
        certificate = request.scope.get(CLIENT_CERTIFICATE)
        if certificate is not None:
            try:
                checked_expiry_ms(certificate, self._revocations(), self._clock.wall_ms())
            except SaslAuthenticationFailed as error:
                raise CertificateRefused(error.message) from error

    def _signer(self, request: Request) -> Signer | None:
        """Check the head of a request, and return who may have signed it; None if every credential is accepted. Raises
        the errors of `check_head`, and `Unavailable`."""
        if not self._is_signed:
            return None
        if self._log_ins.is_stale():
            raise Unavailable(CUT_OFF)
        now = datetime.fromtimestamp(self._clock.wall_ms() / 1000, UTC)
        headers = join_headers(request.scope["headers"])
        authorization = check_head(headers, request.scope["query_string"].decode("latin-1"), now)
        key_id = authorization.access_key
        secret = self._keys_of_file.get(key_id)
        if secret is not None:
            return Signer(headers, authorization, ClientSession(key_id), secret)
        found = self._access_keys.find(key_id)
        if found is None:
            return Signer(headers, authorization, None, self._substitute)
        return Signer(headers, authorization, ClientSession(found.user, credential_id=key_id), found.secret)


class Signer(NamedTuple):
    """Who has signed a request, if its signature is right. `session`: None for an unknown access key, whose signature
    is never right. `repr` hides the secret."""

    headers: Mapping[str, str]
    authorization: Authorization
    session: ClientSession | None
    secret: str

    def __repr__(self) -> str:
        return "Signer(hidden)"

    def check(self, request: Request, body_sha256: str) -> None:
        """Check the signature of a request. Raises `SignatureDoesNotMatch`."""
        signed = SignedRequest(
            request.method,
            _raw_path(request),
            request.scope["query_string"].decode("latin-1"),
            self.headers,
            body_sha256,
        )
        check_signature(signed, self.authorization, self.secret)
        if self.session is None:
            raise SignatureDoesNotMatch


def _stated_access_key(request: Request) -> str:
    """Return the access key id that a request states, "" if it states none."""
    match = _ACCESS_KEY.search(request.headers.get("authorization", "")[:2000])
    return "" if match is None else match[1]


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _form_action(body: bytes) -> str:
    """Return the action in the first parameters of a form, "" if it is not there."""
    found = _FORM_ACTION.search(body[:PIECE_BYTES])
    return "" if found is None else found[1].decode()


def _raw_path(request: Request) -> str:
    """Return the path of a request as it was sent: `%2F` and `%3F` in it are data."""
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    return raw.decode("latin-1")


def _decode(request: Request, target: str, body: bytes) -> tuple[str, dict[str, Any]]:
    """Return the action and the parameters of a request in AWS JSON 1.0."""
    action = target.removeprefix(TARGET_PREFIX)
    if request.method != "POST" or not target.startswith(TARGET_PREFIX) or action not in REQUESTS:
        raise UnsupportedOperation(f"The action {target[:100]} is not valid for this endpoint.")
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidParameterValue("The body is not JSON.") from error
    return action, checked(REQUESTS[action], value, action)


def _decode_query(request: Request, body: bytes) -> tuple[str, dict[str, Any]]:
    """Return the action and the parameters of a request in the Query protocol. The address can be that of a queue."""
    form = query_protocol.parse_form(body, request.scope["query_string"].decode("latin-1"))
    action = form.pop("Action", "")
    if action not in REQUESTS:
        raise InvalidAction(f"The action {action[:100]} is not valid for this endpoint.")
    form.pop("Version", None)
    path = _raw_path(request)
    if "QueueUrl" not in form and path.strip("/"):
        form["QueueUrl"] = path
    return action, query_protocol.decode(action, form)


class CertificateRefused(QueueError):
    """The certificate of the client has expired, or was revoked."""

    code = ACCESS_DENIED
    http_status = 403


class InvalidAction(QueueError):
    """The action or operation requested is invalid."""

    code = "InvalidAction"


def _error_response(error: MansioError, request_id: str, *, is_json: bool) -> Response:
    code, is_sender = error_code(error)
    status = error.http_status if 400 <= error.http_status < 600 else 500
    query_code = code
    if isinstance(error, QueueError):
        query_code = error.query_code or code
    elif code == ACCESS_DENIED:
        query_code = "AccessDenied"
    headers = {"x-amzn-requestid": request_id}
    if is_json:
        headers["x-amzn-query-error"] = f"{query_code};{'Sender' if is_sender else 'Receiver'}"
        body = {"__type": f"com.amazonaws.sqs#{code}", "message": error.message}
        return Response(json.dumps(body), status, headers, JSON_TYPE)
    content = query_protocol.encode_error(
        query_code, error.message, is_sender=is_sender, request_id=request_id
    )
    return Response(content, status, headers, XML_TYPE)
