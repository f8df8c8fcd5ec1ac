"""Request router: passes decoded requests to their handlers and encodes the results, for all APIs whose handlers do not
receive the raw frame.

Handlers are named in the versions table as "module.function" under `mansio.api.kafka.handlers`; the module is imported
the first time a request needs it. A handler takes `(service, request, context)` and returns the response's fields; a
handler of an API marked `is_decoded_by_handler` receives the request's bytes.

A large request is decoded, and its response encoded, on a thread: both take up to half a second.

Invariant: `run` completes its pending response, or closes the connection when no correct response exists.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from mansio.api.kafka.large_requests import on_thread
from mansio.api.kafka.server.authorization_table import (
    ADMINISTRATIVE,
    CHANGES_MAX,
    OTHER_CHANGES_MAX,
    changes_of,
)
from mansio.errors import AuthorizationFailed, MansioError, WireError
from mansio.logs import fields as fields_of_event
from mansio.state.audit.audit_merger import OTHER_RESOURCES
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey, advertised_versions
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from mansio.api.kafka.connections.pending_response import PendingResponse
    from mansio.api.kafka.connections.request_context import RequestContext
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.wire.codec.messages import Struct
    from mansio.wire.headers import RequestHeader


logger = logging.getLogger(__name__)

UNSUPPORTED_VERSION = 35
"""Kafka's error code."""


if TYPE_CHECKING:
    Handler = Callable[[BrokerServices, Any, RequestContext], Awaitable[Mapping[str, Any] | bytes]]


class RequestRouter:
    """Runs the handlers of requests; imports each handler when it is first needed."""

    __slots__ = ("_handlers", "_service")

    def __init__(self, service: BrokerServices) -> None:
        self._service = service
        self._handlers: dict[int, Handler] = {}

    async def run(
        self, request: Struct | bytes, context: RequestContext, pending_response: PendingResponse
    ) -> None:
        """Run the handler of one request and complete its response. A handler returns the fields of the response, or
        the encoded response as `bytes`."""
        try:
            fields = await self._handle(request, context, pending_response)
            if fields is not None:
                pending_response.answer([_encode(fields, context)])
        finally:
            # No effect after a response. Otherwise an unexpected error or a shutdown: close the connection.
            pending_response.abandon()

    async def run_large(
        self,
        body: bytes,
        context: RequestContext,
        pending_response: PendingResponse,
        on_decoded: Callable[[], None],
    ) -> None:
        """Like `run`, for the bytes of a large request. `on_decoded` is called when they are no longer held."""
        try:
            fields: Mapping[str, Any] | bytes | None
            if SUPPORTED_APIS[ApiKey(context.api_key)].is_decoded_by_handler:
                try:
                    fields = await self._handle(body, context, pending_response)
                finally:
                    on_decoded()
            else:
                try:
                    request = await on_thread(
                        self._service,
                        partial(messages.decode_request, context.api_key, context.api_version, body),
                    )
                except WireError as error:
                    pending_response.reject(error)
                    return
                finally:
                    del body
                    on_decoded()
                if pending_response.is_abandoned:
                    return  # its client may have committed later offsets on another connection meanwhile
                fields = await self._handle(request, context, pending_response)
            if isinstance(fields, bytes):
                pending_response.answer([fields])
            elif fields is not None:
                pending_response.answer([await on_thread(self._service, partial(_encode, fields, context))])
        finally:
            pending_response.abandon()

    async def _handle(
        self, request: Struct | bytes, context: RequestContext, pending_response: PendingResponse
    ) -> Mapping[str, Any] | bytes | None:
        """Return the fields of the response, or its bytes; None after the connection has been closed instead."""
        handler = self._handlers.get(context.api_key) or self._find(context.api_key)
        try:
            fields = await handler(self._service, request, context)
        except MansioError as error:
            if isinstance(error, WireError) and SUPPORTED_APIS[ApiKey(context.api_key)].is_decoded_by_handler:
                pending_response.reject(error)  # invalid bytes, which only the handler can detect
                return None
            is_audited = isinstance(error, AuthorizationFailed) and self._service.audit.is_enabled
            if not is_audited:
                _log_rejection(error, context)
            rejection = _error_fields(error, context)
            if rejection is None:
                pending_response.reject(error)
                return None
            fields = rejection
        if not isinstance(fields, bytes):
            self._service.statistics.count_errors(context.api_key, fields)
            if context.api_key in ADMINISTRATIVE and self._service.audit.is_enabled:
                self._report_changes(request, context, fields)
        return fields

    def _report_changes(
        self, request: Struct | bytes, context: RequestContext, fields: Mapping[str, Any]
    ) -> None:
        audit, caller = self._service.audit, context.caller
        changes = changes_of(context.api_key, request, fields)
        for change in islice(changes, CHANGES_MAX.get(context.api_key, OTHER_CHANGES_MAX)):
            audit.report_change(caller, *change)
        for resource_type, count in Counter(change.resource_type for change in changes).items():
            audit.report_change(caller, resource_type, OTHER_RESOURCES, event_count=count)

    def _find(self, api_key: int) -> Handler:
        name = SUPPORTED_APIS[ApiKey(api_key)].handler
        assert name is not None
        module, _, function = name.rpartition(".")
        handler: Handler = getattr(importlib.import_module(f"mansio.api.kafka.handlers.{module}"), function)
        self._handlers[api_key] = handler
        return handler

    def unsupported_api_versions(self, header: RequestHeader, pending_response: PendingResponse) -> None:
        """Answer an ApiVersions request of an unknown version: in version 0, with the supported versions and the error
        UNSUPPORTED_VERSION (KIP-511)."""
        api_keys = [
            {"api_key": key, "min_version": lowest, "max_version": highest}
            for key, lowest, highest in advertised_versions()
        ]
        fields = {"error_code": UNSUPPORTED_VERSION, "api_keys": api_keys}
        pending_response.answer(
            [messages.encode_response(ApiKey.API_VERSIONS, 0, header.correlation_id, fields)]
        )


def _encode(fields: Mapping[str, Any] | bytes, context: RequestContext) -> bytes:
    if isinstance(fields, bytes):
        return fields
    return messages.encode_response(context.api_key, context.api_version, context.correlation_id, fields)


def _log_rejection(error: MansioError, context: RequestContext) -> None:
    logger.warning(
        "request_rejected",
        extra=fields_of_event(
            api=ApiKey(context.api_key).name.lower(),
            client=context.client_host,
            client_id=context.client_id,
            user=context.session.user,
            error=type(error).__name__,
            reason=error.message,
        ),
    )


def _error_fields(error: MansioError, context: RequestContext) -> dict[str, Any] | None:
    """Return the fields of a response that rejects the whole request; None if the version of the API has an error per
    item only."""
    names = messages.field_names(context.api_key, context.api_version, messages.RESPONSE)
    if "error_code" not in names:
        return None
    return {
        "error_code": error.kafka_code,
        **({"error_message": error.message} if "error_message" in names else {}),
    }
