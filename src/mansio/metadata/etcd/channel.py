"""One etcd endpoint: its gRPC channel, and the check whether its etcd version is supported.

Invariants:
* A call is sent only over an established connection; if there is none, the call is not executed.
* The version and the cluster of an etcd are checked before any other call, and again after a failure, because another
  etcd may have replaced it.

HTTP/2 pings are sent only while a call waits for a response, because etcd closes idle connections that send pings.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import grpc
import grpc.aio

from mansio.errors import Unavailable
from mansio.logs import fields
from mansio.metadata.etcd import rpc_pb2 as rpc
from mansio.metadata.etcd.call_outcome import (
    CallOutcome,
    EtcdDenied,
    EtcdUnsupported,
    Failure,
    classify,
    to_one_line,
)
from mansio.metadata.etcd.config import host_and_port
from mansio.metadata.etcd.messages import RANGE, STATUS, Method
from mansio.metadata.etcd.versions import VersionSupport, version_support
from mansio.metadata.metadata_store import FIRST_CLUSTER_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from mansio.metadata.etcd.config import Certificates

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

CALL_DEADLINE_S: Final = 1.0
MESSAGE_BYTES_MAX: Final = 64 * 1024 * 1024
RECOMMENDED_VERSION: Final = "3.5.13 or later"
REQUIRE_LEADER: Final = ("hasleader", "true")
"""gRPC metadata with which an etcd member that has no leader returns an error immediately instead of waiting."""

CHANNEL_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)

logger = logging.getLogger(__name__)


class CallFailed(Exception):
    """Raised when a call ended without a response. `failure` is its classification."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error.message)
        self.failure = failure


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        certificates.ca, private_key=certificates.key, certificate_chain=certificates.certificate
    )


class SingleFlight(Generic[T]):
    """One run of a coroutine, shared by all concurrent callers.

    A call during a run waits for that run; a later call starts a new one. The cancellation of a caller does not cancel
    the run. So a hundred calls that wait for an endpoint that does not respond take as long as one call.
    """

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None

    async def run(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Wait for the current run, which `begin` starts if there is none. Returns its result or raises its error."""
        if self._task is None:
            self._task = asyncio.create_task(begin())
            self._task.add_done_callback(self._on_done)
        return await asyncio.shield(self._task)

    def _on_done(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # marked as retrieved, in case all callers were cancelled


class Endpoint:
    """One etcd endpoint, created on the event loop that uses it. `url` is the text for messages.

    `checked`: the version and the cluster of this etcd were checked since the last failure.
    """

    def __init__(self, url: str, certificates: Certificates | None) -> None:
        self.url = url
        self._channel = (
            grpc.aio.insecure_channel(host_and_port(url), options=CHANNEL_OPTIONS)
            if certificates is None
            else grpc.aio.secure_channel(
                host_and_port(url), channel_credentials(certificates), options=CHANNEL_OPTIONS
            )
        )
        self._calls: dict[str, Any] = {}
        self.checked = False
        self._warned = ""
        self._closed = False
        self._checking: SingleFlight[int] = SingleFlight()

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()

    def require_check(self) -> None:
        """Reset `checked`, so that version and cluster are checked again before the next call."""
        self.checked = False

    async def call(
        self, method: Method[RequestT, ResponseT], request: RequestT, metadata: Metadata, deadline_s: float
    ) -> ResponseT:
        """Execute one call, without retries. `deadline_s` includes the time to connect. Raises `CallFailed`."""
        end = asyncio.get_running_loop().time() + deadline_s
        await self._connect(deadline_s)
        left_s = max(0.001, end - asyncio.get_running_loop().time())
        call = self._calls.get(method.path)
        if call is None:
            call = self._calls[method.path] = self._channel.unary_unary(
                method.path, request_serializer=method.write, response_deserializer=method.read
            )
        try:
            answer: ResponseT = await call(request, timeout=left_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise CallFailed(classify(error.code(), error.details(), self.url)) from error
        except asyncio.CancelledError:
            if self._closed and not _is_task_cancelled():
                raise CallFailed(classify(grpc.StatusCode.CANCELLED, "closed", self.url)) from None
            raise
        return answer

    async def stream(
        self, method: Method[RequestT, ResponseT], metadata: Metadata
    ) -> Stream[RequestT, ResponseT]:
        """Open a stream. Raises `CallFailed` if there is no connection; the reads raise errors of the stream."""
        await self._connect(CALL_DEADLINE_S)
        begin = self._channel.stream_stream(
            method.path, request_serializer=method.write, response_deserializer=method.read
        )
        return Stream(begin(metadata=metadata), self.url)

    async def _connect(self, deadline_s: float) -> None:
        """Wait until the channel is connected, or until gRPC fails to connect; then the following call fails.

        Raises `CallFailed` after `deadline_s`.
        """
        state = self._channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return
        try:
            async with asyncio.timeout(deadline_s):
                while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError:
            failure = classify(grpc.StatusCode.DEADLINE_EXCEEDED, None, self.url)
            raise CallFailed(failure._replace(outcome=CallOutcome.NOT_DONE)) from None

    async def check(self, metadata: Metadata, cluster_id: int | None) -> int:
        """Check the version and the cluster of this etcd. Returns the id of its cluster.

        `cluster_id` is the expected id, None if it is unknown. Raises `CallFailed`, whose error is `EtcdUnsupported` if
        this etcd must not be used.
        """
        return await self._checking.run(lambda: self._check(metadata, cluster_id))

    async def _check(self, metadata: Metadata, cluster_id: int | None) -> int:
        try:
            status = await self.call(STATUS, rpc.StatusRequest(), metadata, CALL_DEADLINE_S)
        except CallFailed as failed:
            denied = isinstance(failed.failure.error, EtcdDenied)
            if failed.failure.outcome is not CallOutcome.REFUSED or not denied:
                raise
            return await self._check_without_status(metadata, cluster_id)
        self._check_version(status.version)
        found = self._check_cluster_id(status.header.cluster_id, cluster_id)
        if status.is_learner:
            error = Unavailable(f"etcd at {self.url} is a learner, which is not a full member yet")
            raise CallFailed(Failure(CallOutcome.NOT_DONE, error, try_other_endpoint=True))
        for alarm in status.errors:
            logger.warning("etcd_alarm", extra=fields(endpoint=self.url, alarm=to_one_line(alarm)))
        self.checked = True
        return found

    async def _check_without_status(self, metadata: Metadata, cluster_id: int | None) -> int:
        """Check an etcd that denies its status, by a read: every response contains the cluster id.

        Only etcd 3.6 and later, whose versions are all supported, deny the status to users other than root. A learner
        rejects the read.
        """
        request = rpc.RangeRequest(key=FIRST_CLUSTER_KEY.encode(), keys_only=True)
        answer = await self.call(RANGE, request, metadata, CALL_DEADLINE_S)
        found = self._check_cluster_id(answer.header.cluster_id, cluster_id)
        self.checked = True
        return found

    def _check_cluster_id(self, found: int, cluster_id: int | None) -> int:
        if cluster_id not in (None, found):
            raise _unsupported_error(
                f"etcd at {self.url} belongs to another etcd cluster than the other endpoints"
            )
        return found

    def _check_version(self, version: str) -> None:
        match version_support(version):
            case VersionSupport.REFUSED:
                shown = to_one_line(version) if version else "of unknown version"
                raise _unsupported_error(
                    f"etcd at {self.url} is {shown}, which can lose data or is too old: use {RECOMMENDED_VERSION}"
                )
            case VersionSupport.OLD if version != self._warned:
                self._warned = version
                logger.warning(
                    "etcd_version_old",
                    extra=fields(
                        endpoint=self.url, version=to_one_line(version), advised=RECOMMENDED_VERSION
                    ),
                )


def _is_task_cancelled() -> bool:
    """Whether the current task was cancelled, and not only the gRPC call in it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _unsupported_error(message: str) -> CallFailed:
    return CallFailed(Failure(CallOutcome.NOT_DONE, EtcdUnsupported(message), try_other_endpoint=True))


class Stream(Generic[RequestT, ResponseT]):
    """A bidirectional gRPC stream. The caller has to close it."""

    def __init__(self, call: Any, url: str) -> None:
        self._call = call
        self._url = url

    async def write(self, request: RequestT) -> None:
        """Send one message. Raises `CallFailed`."""
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._stream_failure() from None

    async def read(self, silence_s: float) -> ResponseT:
        """Wait for the next message. Raises `CallFailed` at the end, and after `silence_s` without a message."""
        try:
            async with asyncio.timeout(silence_s):
                answer = await self._call.read()
        except TimeoutError:
            raise CallFailed(classify(grpc.StatusCode.DEADLINE_EXCEEDED, "silent", self._url)) from None
        except grpc.aio.AioRpcError as error:
            raise CallFailed(classify(error.code(), error.details(), self._url)) from error
        if answer is grpc.aio.EOF:
            raise await self._stream_failure()
        message: ResponseT = answer
        return message

    def close(self) -> None:
        self._call.cancel()

    async def _stream_failure(self) -> CallFailed:
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.UNAVAILABLE, "the stream has ended"
        return CallFailed(classify(code, details, self._url))
