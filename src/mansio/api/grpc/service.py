"""Methods of the gRPC service: each decodes a request, calls a service or a routed client, and encodes."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.grpc.answers import records_response
from mansio.api.grpc.authentication import session_of_call
from mansio.api.grpc.conversion import (
    error_of,
    headers_of,
    moment,
    published_ranges,
    record_of,
    to_ms,
)
from mansio.api.grpc.endings import host_of
from mansio.api.grpc.receive_stream import ReceiveStream, acknowledgements_of
from mansio.api.grpc.requests import Requests
from mansio.api.routing.group_offsets import reset_group_offsets
from mansio.api.routing.publishing import publish_records
from mansio.api.routing.read_records import read_records
from mansio.api.routing.schema_values import encode_values
from mansio.broker.coordinator.group.group_inspection import SHARE
from mansio.broker.routing.caller import CLIENT_ID_CHARACTERS_MAX, Caller, check_client_id, on_listener
from mansio.broker.services.share_groups.leases import Acknowledgement
from mansio.client.admin.record_search import DEFAULT_TIMEOUT_MS, FoundRecord
from mansio.client.admin.transactions import HANGING_OPEN_MS_MIN
from mansio.client.types import Message
from mansio.errors import GroupIdNotFound, InvalidRequest, TopicAuthorizationFailed
from mansio.state.share_partition.types import ACCEPT, REJECT, RELEASE, RENEW
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from mansio.api.routing.routed_clients import RoutedClients
    from mansio.broker.services.broker_services import BrokerServices
    from mansio.client import Client
    from mansio.client.admin.admin import ConfigEntry
    from mansio.ports import Clock

GRPC_CLIENT_ID: Final = "mansio-grpc"
"""Client id of calls without `CLIENT_ID_KEY` and `user-agent` in their metadata."""

CLIENT_ID_KEY: Final = "mansio-client-id"
"""Key in the metadata of a call by which a client states its id."""

FILTERS_MAX: Final = 1_000
"""Maximum number of values by which a list is filtered."""


class MansioService:
    """The methods of `mansio.v1.Mansio`, by name. All run on the broker's event loop and raise `MansioError`, or
    `ValueError` for an argument that the client refuses. Those with records to publish get their requests as bytes."""

    def __init__(self, services: BrokerServices, clients: RoutedClients) -> None:
        self._services = services
        self._clients = clients
        self._requests = Requests()

    def _client(self, context: Any) -> Client:
        """Return a client that acts for the caller of a method."""
        return self._clients.client(caller_of(context, self._services.clock))

    # Records

    async def Publish(self, request: bytes, context: Any) -> Any:  # noqa: N802 - the name in the service
        async with self._requests.publication(request) as found:
            caller = caller_of(context, self._services.clock)
            records = found.records
            if found.schema:
                client = self._clients.client(caller)
                records = await encode_values(self._services, client, found.topic, found.schema, records)
            result = await publish_records(self._services, self._clients, found.topic, records, caller=caller)
        return pb.PublishResponse(ranges=published_ranges(result))

    async def PublishStream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in requests:
            yield await self._services.statistics.holds.measured(
                partial(self.Publish, request, context), "grpc", lambda: ("PublishStream", context.peer())
            )

    async def Fetch(self, request: Any, context: Any) -> Any:  # noqa: N802
        chosen = request.WhichOneof("start")
        start: Any = "earliest"
        if chosen == "offset":
            start = request.offset
            if start < 0:
                raise InvalidRequest(f"offset: {start} is negative")
        elif chosen == "time_ms":
            start = moment(request.time_ms, "time_ms")
        elif chosen == "latest" and request.latest:
            start = "latest"
        found = await read_records(
            self._services,
            self._clients,
            TopicPartition(request.topic, request.partition),
            start,
            caller=caller_of(context, self._services.clock),
            max_records=request.max_records or 100,
            max_bytes=request.max_bytes or 1 << 20,
            wait_ms=request.wait_ms,
        )
        return await records_response(
            pb.FetchResponse,
            found.records,
            lambda _: ("", 0),
            next_offset=found.next_offset,
            unreadable=[pb.UnreadableOffsets(**each._asdict()) for each in found.unreadable],
        )

    async def ListOffsets(self, request: Any, context: Any) -> Any:  # noqa: N802
        chosen = request.WhichOneof("at")
        at: Any = "earliest" if chosen == "earliest" and request.earliest else "latest"
        if chosen == "time_ms":
            at = moment(request.time_ms, "time_ms")
        found = await self._client(context).admin.list_offsets(
            await self._partitions(context, request.topic), at
        )
        return pb.ListOffsetsResponse(
            partitions=[
                pb.PartitionOffset(partition=each.partition, offset=one.offset, timestamp_ms=one.timestamp_ms)
                for each, one in sorted(found.items())
            ]
        )

    async def _partitions(self, context: Any, topic: str) -> list[TopicPartition]:
        description = await self._client(context).admin.describe_topic(topic)
        return [TopicPartition(topic, each.index) for each in description.partitions]

    # Share groups

    async def Receive(self, _requests: Any, context: Any) -> None:  # noqa: N802
        await ReceiveStream(self._services, context, caller_of(context, self._services.clock)).run()

    async def Ack(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._acknowledge(
            context, request.group, [Acknowledgement(each, ACCEPT) for each in request.receipts]
        )

    async def Retry(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._acknowledge(context, request.group, acknowledgements_of(RELEASE, request.records))

    async def Reject(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._acknowledge(context, request.group, acknowledgements_of(REJECT, request.records))

    async def Extend(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._acknowledge(context, request.group, acknowledgements_of(RENEW, request.records))

    async def _acknowledge(self, context: Any, group: str, acknowledgements: list[Acknowledgement]) -> Any:
        caller = caller_of(context, self._services.clock)
        results = await self._services.leases.acknowledge(group, acknowledgements, caller=caller)
        failed = [
            pb.FailedAcknowledgement(receipt=each.receipt, error=error_of(error))
            for each, error in zip(acknowledgements, results, strict=True)
            if error is not None
        ]
        return pb.AcknowledgeResponse(failed=failed)

    async def Redrive(self, request: Any, context: Any) -> Any:  # noqa: N802
        partition = TopicPartition(request.topic, request.partition)
        if partition not in await self._partitions(context, request.topic):
            raise InvalidRequest(f"topic {request.topic} has no partition {request.partition}")
        if not request.redrive_id:
            raise InvalidRequest("redrive_id: choose one, and repeat a request of unknown outcome with it")
        found = await self._client(context).admin.shares.redrive(
            request.group, partition, redrive_id=request.redrive_id, records_max=request.max_records or 500
        )
        return pb.RedriveResponse(
            redriven=found.redriven, repeated=found.repeated, deleted=found.deleted, dead=found.dead
        )

    # Topics

    async def ListTopics(self, request: Any, context: Any) -> Any:  # noqa: N802
        names = await self._client(context).admin.list_topics(include_internal=request.include_internal)
        return pb.ListTopicsResponse(names=names)

    async def CreateTopic(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._client(context).admin.create_topic(
            request.name,
            partitions=request.partitions or -1,
            replication_factor=request.replication_factor or -1,
            config=dict(request.config),
        )
        return await self._describe_changed_topic(context, request.name)

    async def DescribeTopic(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self._describe_topic(context, request.name)

    async def _describe_topic(self, context: Any, name: str) -> Any:
        admin = self._client(context).admin
        found = await admin.describe_topic(name)
        config: Mapping[str, ConfigEntry] = {}
        with contextlib.suppress(TopicAuthorizationFailed):  # it needs another right
            config = await admin.describe_config(name)
        return pb.Topic(
            name=name,
            id=found.topic_id,
            partitions=[
                pb.Partition(
                    partition=each.index,
                    leader=each.leader,
                    replicas=each.replicas,
                    in_sync_replicas=each.in_sync_replicas,
                )
                for each in found.partitions
            ],
            config={entry.name: entry.value or "" for entry in config.values() if not entry.is_default},
        )

    async def AlterTopic(self, request: Any, context: Any) -> Any:  # noqa: N802
        changes = _changes(request)
        if changes:
            await self._client(context).admin.alter_topic_config(request.name, changes)
        if request.partitions:
            await self._client(context).admin.create_partitions(request.name, request.partitions)
        return await self._describe_changed_topic(context, request.name)

    async def _describe_changed_topic(self, context: Any, name: str) -> Any:
        """Return a topic after a change; its name alone if the caller may not describe it."""
        try:
            return await self._describe_topic(context, name)
        except TopicAuthorizationFailed:
            return pb.Topic(name=name)

    async def DeleteTopic(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._client(context).admin.delete_topic(request.name)
        return pb.Empty()

    # Groups

    async def ListGroups(self, _request: Any, context: Any) -> Any:  # noqa: N802
        found = await self._client(context).admin.list_groups()
        groups = [pb.Group(name=each.group_id, type=each.group_type, state=each.state) for each in found]
        return pb.ListGroupsResponse(groups=groups, is_complete=found.is_complete)

    async def GetGroupOffsets(self, request: Any, context: Any) -> Any:  # noqa: N802
        admin = self._client(context).admin
        kinds = {each.group_id: each.group_type for each in await admin.list_groups()}
        if request.name not in kinds:
            raise GroupIdNotFound(f"there is no group {request.name!r}")
        rows: list[tuple[TopicPartition, int | None, int | None]]
        if kinds[request.name] == SHARE:
            shares = await admin.shares.offsets(request.name)
            rows = [(each, one.start_offset, one.lag) for each, one in shares.items()]
        else:
            lags = await admin.group_lag(request.name)
            rows = [(each, one.committed_offset, one.lag) for each, one in lags.items()]
        return pb.GroupOffsets(
            offsets=[
                pb.GroupOffset(topic=each.topic, partition=each.partition, offset=offset, lag=lag)
                for each, offset, lag in sorted(rows, key=lambda row: row[0])
            ]
        )

    async def ResetGroupOffsets(self, request: Any, context: Any) -> Any:  # noqa: N802
        chosen = request.WhichOneof("to")
        to: Any = chosen
        if chosen is None:
            raise InvalidRequest("give earliest, latest, offset or time_ms")
        if chosen == "offset":
            to = request.offset
        elif chosen == "time_ms":
            to = moment(request.time_ms, "time_ms")
        found = await reset_group_offsets(self._client(context), request.group, list(request.topics), to=to)
        return pb.GroupOffsets(
            offsets=[
                pb.GroupOffset(topic=each.topic, partition=each.partition, offset=offset)
                for each, offset in sorted(found.items())
            ]
        )

    async def ExplainGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        sample_ms = request.sample_ms if request.HasField("sample_ms") else 1_000
        found = asdict(
            await self._client(context).admin.explain_group(request.group, sample=sample_ms / 1000)
        )
        found["group"] = found.pop("group_id")
        found["findings"] = [pb.GroupFinding(**each) for each in found["findings"]]
        return pb.GroupExplanation(**found)

    async def AlterGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._client(context).admin.alter_group_config(request.group, _changes(request))
        return pb.Empty()

    async def DeleteGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._client(context).admin.delete_group(request.name)
        return pb.Empty()

    # Delayed records and schedules

    async def ListDelayed(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not 0 <= request.max_records <= 1_000:
            raise InvalidRequest("max_records: 0 to 1000")
        page = await self._client(context).admin.delays.list(
            request.topic, limit=request.max_records or 100, after=request.cursor or None
        )
        records = [
            pb.DelayedRecord(
                id=pb.DelayedId(partition=each.partition, id=each.id),
                due_ms=to_ms(each.due),
                record=record_of(
                    Message(
                        each.topic,
                        each.partition,
                        each.id,
                        each.timestamp_ms,
                        each.key,
                        each.value,
                        each.headers,
                    )
                ),
            )
            for each in page.records
        ]
        return pb.ListDelayedResponse(records=records, next_cursor=page.next or "")

    async def ChangeDelayed(self, request: Any, context: Any) -> Any:  # noqa: N802
        ids = [(each.partition, each.id) for each in request.ids]
        if not 1 <= len(ids) <= 1_000 or any(partition < 0 or number < 0 for partition, number in ids):
            raise InvalidRequest("ids: 1 to 1000 pending records")
        delays, chosen = self._client(context).admin.delays, request.WhichOneof("change")
        if chosen == "cancel":
            found = await delays.cancel(request.topic, ids)
        elif chosen == "deliver_now":
            found = await delays.deliver_now(request.topic, ids)
        elif chosen == "delay_ms":
            found = await delays.reschedule(request.topic, ids, delay=request.delay_ms / 1000)
        elif chosen == "deliver_at_ms":
            at = moment(request.deliver_at_ms, "deliver_at_ms")
            found = await delays.reschedule(request.topic, ids, at=at)
        else:
            raise InvalidRequest("give cancel, deliver_now, delay_ms or deliver_at_ms")

        def messages(changed: Any) -> list[Any]:
            return [pb.DelayedId(partition=each.partition, id=each.id) for each in changed]

        return pb.ChangeDelayedResponse(
            changed=messages(found.changed),
            not_pending=messages(found.not_pending),
            unknown=messages(found.unknown),
        )

    async def CreateSchedule(self, request: Any, context: Any) -> Any:  # noqa: N802
        chosen = request.WhichOneof("recurrence")
        if chosen is None:
            raise InvalidRequest("give cron or every_ms")
        found = await self._client(context).admin.schedules.create(
            request.topic,
            request.name,
            request.value if request.HasField("value") else None,
            cron=request.cron if chosen == "cron" else None,
            every=timedelta(milliseconds=request.every_ms) if chosen == "every_ms" else None,
            timezone=request.timezone or None,
            catch_up=request.catch_up or "none",
            key=request.key if request.HasField("key") else None,
            headers=headers_of(request.headers),
        )
        return _schedule(found)

    async def ListSchedules(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = await self._client(context).admin.schedules.list(request.name)
        return pb.ListSchedulesResponse(schedules=[_schedule(each) for each in found])

    async def ChangeSchedule(self, request: Any, context: Any) -> Any:  # noqa: N802
        schedules = self._client(context).admin.schedules
        calls = {"pause": schedules.pause, "resume": schedules.resume, "delete": schedules.delete}
        chosen = request.WhichOneof("change")
        if chosen is None:
            raise InvalidRequest("give pause, resume or delete")
        await calls[chosen](request.topic, request.name)
        return pb.Empty()

    # Transactions

    async def ListTransactions(self, request: Any, context: Any) -> Any:  # noqa: N802
        open_ms_min = _optional(request, "open_ms_min")
        if len(request.states) > FILTERS_MAX or len(request.producer_ids) > FILTERS_MAX:
            raise InvalidRequest(f"states, producer_ids: at most {FILTERS_MAX}")
        if (open_ms_min or 0) < 0:
            raise InvalidRequest("open_ms_min: it is negative")
        found = await self._client(context).admin.transactions.list(
            states=request.states,
            producer_ids=request.producer_ids,
            open_ms_min=open_ms_min,
            pattern=request.pattern or None,
        )
        return pb.ListTransactionsResponse(
            transactions=[pb.TransactionSummary(**asdict(each)) for each in found],
            is_complete=found.is_complete,
        )

    async def DescribeTransaction(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = await self._client(context).admin.transactions.describe(request.transactional_id)
        return pb.Transaction(
            transactional_id=found.transactional_id,
            coordinator_id=found.coordinator_id,
            state=found.state,
            producer_id=found.producer_id,
            producer_epoch=found.producer_epoch,
            timeout_ms=found.timeout_ms,
            started_ms=found.started_ms,
            partitions=[pb.TransactionPartition(**each._asdict()) for each in found.partitions],
        )

    async def TerminateTransaction(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._client(context).admin.transactions.terminate(request.transactional_id)
        return pb.Empty()

    async def DescribeProducers(self, request: Any, context: Any) -> Any:  # noqa: N802
        partition = TopicPartition(request.topic, request.partition)
        found = await self._client(context).admin.transactions.describe_producers([partition])
        return pb.Producers(producers=[pb.Producer(**asdict(each)) for each in found[partition]])

    async def FindHangingTransactions(self, request: Any, context: Any) -> Any:  # noqa: N802
        partition, open_ms_min = _optional(request, "partition"), _optional(request, "open_ms_min")
        if partition is not None and not request.topic:
            raise InvalidRequest("partition: it needs a topic")
        chosen: list[TopicPartition | str] | None = None
        if request.topic:
            chosen = [request.topic if partition is None else TopicPartition(request.topic, partition)]
        found = await self._client(context).admin.transactions.find_hanging(
            chosen,
            node_id=_optional(request, "broker_id"),
            open_ms_min=HANGING_OPEN_MS_MIN if open_ms_min is None else open_ms_min,
        )
        return pb.HangingTransactions(transactions=[pb.HangingTransaction(**asdict(each)) for each in found])

    async def AbortTransaction(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = await self._client(context).admin.transactions.abort(
            TopicPartition(request.topic, request.partition), request.start_offset, force=request.force
        )
        return pb.Producer(**asdict(found))

    # History

    async def TraceRecord(self, request: Any, context: Any) -> Any:  # noqa: N802
        traces = self._client(context).admin.traces
        if request.last_failed_group:
            found = await traces.last_failed(request.last_failed_group)
        else:
            found = await traces.record(request.topic, request.partition, request.offset)
        return pb.RecordTrace(
            topic=found.topic,
            partition=found.partition,
            offset=found.offset,
            events=[
                pb.TraceEvent(
                    kind=each.kind,
                    time_ms=None if each.time is None else to_ms(each.time),
                    group=each.group or "",
                    attempt=each.attempt,
                    who=each.who,
                    detail=each.detail,
                    wait_ms=each.wait_ms,
                    is_computed=each.is_computed,
                )
                for each in found.events
            ],
            certain=found.certain,
            uncertainties=found.uncertainties,
            total_ms=found.total_ms,
            leader=found.leader,
            replicas=found.replicas,
            in_sync=found.in_sync,
            is_stored=found.is_stored,
            timestamp_ms=None if found.timestamp is None else to_ms(found.timestamp),
            size_bytes=found.size_bytes,
        )

    async def FindRecords(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        since_ms, until_ms = _optional(request, "since_ms"), _optional(request, "until_ms")
        timeout_ms = _optional(request, "timeout_ms")
        wanted = request.WhichOneof("wanted")
        found = self._client(context).admin.traces.search(
            request.topic,
            key=request.key if wanted == "key" else None,
            record_id=request.record_id if wanted == "record_id" else None,
            partition=_optional(request, "partition"),
            since=None if since_ms is None else moment(since_ms, "since_ms"),
            until=None if until_ms is None else moment(until_ms, "until_ms"),
            limit=_optional(request, "limit"),
            timeout_ms=DEFAULT_TIMEOUT_MS if timeout_ms is None else timeout_ms,
        )
        async with contextlib.aclosing(found):
            async for each in found:
                if isinstance(each, FoundRecord):
                    record = pb.FoundRecord(
                        partition=each.partition, offset=each.offset, timestamp_ms=each.timestamp_ms
                    )
                    yield pb.FindRecordsResponse(found=record)
                else:
                    progress = pb.SearchProgress(
                        partitions=each.partitions,
                        finished_partitions=each.finished_partitions,
                        searched_bytes=each.searched_bytes,
                        left_bytes=each.left_bytes,
                        skipped=[pb.SkippedRange(**one._asdict()) for one in each.skipped],
                        skipped_count=each.skipped_count,
                    )
                    yield pb.FindRecordsResponse(progress=progress)


def _optional(request: Any, name: str) -> Any:
    """Return an optional field of a message, None if it is not set."""
    return getattr(request, name) if request.HasField(name) else None


def _changes(request: Any) -> dict[str, str | None]:
    both = set(request.set) & set(request.reset)
    if both:
        raise InvalidRequest(f"set and reset: {min(both)}")
    return {**dict(request.set), **dict.fromkeys(request.reset)}


def _schedule(found: Any) -> Any:
    return pb.Schedule(
        topic=found.topic,
        name=found.name,
        partition=found.partition,
        cron=found.cron or "",
        every_ms=0 if found.every is None else found.every // timedelta(milliseconds=1),
        timezone=found.timezone,
        is_paused=found.is_paused,
        firings=found.firings,
        next_times_ms=[to_ms(each) for each in found.next_times],
        error=found.error or "",
    )


def caller_of(context: Any, clock: Clock) -> Caller:
    """Return the caller of a method, with the deadline of its call by the broker's clock. Raises `InvalidRequest`."""
    metadata = dict(context.invocation_metadata() or ())
    client_id = metadata.get(CLIENT_ID_KEY)
    if client_id is None:
        client_id = str(metadata.get("user-agent", GRPC_CLIENT_ID))[:CLIENT_ID_CHARACTERS_MAX]
    check_client_id(client_id)
    left_s = context.time_remaining()
    deadline = None if left_s is None else clock.monotonic() + left_s
    return Caller(on_listener(session_of_call(), "grpc"), client_id, host_of(context.peer()), deadline)
