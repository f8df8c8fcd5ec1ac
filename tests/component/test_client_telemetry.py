"""Spans, metrics and trace context of traced clients, as OpenTelemetry's SDK receives them from clients of a broker."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags

import mansio
from mansio.errors import LeaseLost, MansioError, UnknownTopicOrPartition
from mansio.telemetry.client_telemetry import LINKS_MAX
from support.client_fixtures import broker_in, run
from support.receive_fixtures import group_of, release_behind_its_back, running, taken
from support.spans import Spans, id_of, linked
from support.waiting import eventually, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_CONTEXT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = SpanContext(0xA1, 0xB2, is_remote=True, trace_flags=TraceFlags(0))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mansio.Broker]:
    with broker_in(tmp_path_factory.mktemp("telemetry"), auto_create_topics_enable=True) as started:
        yield started


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "messaging")
    return Spans()


def traced(broker: mansio.Broker) -> mansio.Client:
    return mansio.connect(broker.address, tracing=True, client_id="shop")


async def stored(client: mansio.Client, topic: str, count: int | None = None) -> list[mansio.Message]:
    """The records of a topic: so many (None: those that there are)."""
    consumer = client.consume(topic, to_end=count is None, max_records=count)
    return [message async for message in consumer]


def context_of(message: mansio.Message) -> tuple[int, int]:
    """Trace id and span id in the headers of a record."""
    _, trace_id, span_id, flags = (message.header("traceparent") or b"").split(b"-")
    assert int(flags, 16) & TraceFlags.SAMPLED
    return int(trace_id, 16), int(span_id, 16)


# -- publishing --------


@pytest.mark.row("T5")
def test_published_record_carries_the_context_of_its_send_span(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with traced(broker) as client:
            with spans.tracer.start_as_current_span("request") as request:
                metadata = await client.publish("orders", b"1 pear", key=b"bob")
            (sent,) = spans.named("send orders")
            (message,) = await stored(client, "orders")
        assert context_of(message) == (sent.context.trace_id, sent.context.span_id)
        assert sent.kind is SpanKind.PRODUCER
        assert sent.parent is not None
        assert sent.parent.span_id == id_of(request)
        host, _, port = broker.address.rpartition(":")
        assert dict(sent.attributes or {}) == {
            "messaging.system": "kafka",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": "orders",
            "messaging.destination.partition.id": str(metadata.partition),
            "messaging.kafka.offset": metadata.offset,
            "messaging.client.id": "shop",
            "server.address": host,
            "server.port": int(port),
        }

    run(scenario)


@pytest.mark.full
@pytest.mark.parametrize("method", ["publish_many", "send", "transaction"])
def test_each_call_of_a_producer_is_one_span(broker: mansio.Broker, spans: Spans, method: str) -> None:
    topic = f"calls-{method}"

    async def scenario() -> None:
        async with traced(broker) as client:
            if method == "publish_many":
                await client.publish_many(topic, [b"a", b"b", mansio.client.OutgoingRecord(b"c", b"key")])
            elif method == "send":
                await (await client.producer().send(topic, b"a"))
            else:
                async with client.transaction("shop") as transaction:
                    await transaction.publish_many(topic, [b"a", b"b"])
            (sent,) = spans.named(f"send {topic}")
            # Readers see a transaction when its markers are written, shortly after its end.
            messages = await stored(client, topic, {"send": 1, "publish_many": 3, "transaction": 2}[method])
        assert {context_of(message) for message in messages} == {
            (sent.context.trace_id, sent.context.span_id)
        }
        count = (sent.attributes or {}).get("messaging.batch.message_count")
        assert count == (None if method == "send" else len(messages))

    run(scenario)


@pytest.mark.full
def test_record_keeps_a_context_of_its_own(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with traced(broker) as client:
            await client.publish("forwarded", b"1", headers={"traceparent": OWN_CONTEXT, "a": b"b"})
            (sent,) = spans.named("send forwarded")
            (message,) = await stored(client, "forwarded")
        assert message.headers == (("traceparent", OWN_CONTEXT), ("a", b"b"))
        assert sent.kind is SpanKind.CLIENT  # it is not the creation context
        assert linked(sent) == [0xB7AD6B7169203331]

    run(scenario)


@pytest.mark.full
def test_headers_of_the_user_stay_as_they_are_whatever_they_are(broker: mansio.Broker, spans: Spans) -> None:
    chance = random.Random(41)
    names = ["a", "mansio-x", "", "traceparent", "tracestate", "Traceparent", "ü"]
    contents = [None, b"", b"1", OWN_CONTEXT, bytes(300)]

    def drawn() -> mansio.client.OutgoingRecord | bytes:
        if chance.random() < 0.4:
            return b"plain"
        count = chance.randrange(4)
        headers = tuple((chance.choice(names), chance.choice(contents)) for _ in range(count))
        return mansio.client.OutgoingRecord(b"value", headers=headers)

    async def scenario() -> None:
        async with traced(broker) as client:
            for number in range(12):
                given = [drawn() for _ in range(chance.randrange(1, 60))]
                await client.publish_many(f"headers-{number}", given)
                found = await stored(client, f"headers-{number}")
                added = {
                    message.headers[-1:]
                    for message, record in zip(found, given, strict=True)
                    if record == b"plain"
                }
                assert len(added) <= 1  # one context for all
                for message, record in zip(found, given, strict=True):
                    own = () if isinstance(record, bytes) else record.headers
                    keeps = any(name in ("traceparent", "tracestate") for name, _ in own)
                    assert message.headers[: len(own)] == own
                    assert [name for name, _ in message.headers[len(own) :]] == (
                        [] if keeps else ["traceparent"]
                    )

    run(scenario)


@pytest.mark.full
def test_delay_id_and_priority_work_as_without_tracing(broker: mansio.Broker, spans: Spans) -> None:
    config = {
        "mansio.delay.enable": "true",
        "mansio.dedup.ms": "60000",
        "mansio.priority.enable": "true",
    }

    async def scenario() -> None:
        async with traced(broker) as client:
            await client.admin.create_topic("features", partitions=1, config=config)
            await client.publish("features", b"1", delay=0.05, headers={"a": "b"})
            await client.publish("features", "2", key="k", dedup_id="once", priority="high")
            again = await client.publish("features", "2", key="k", dedup_id="once")
            await client.publish_many("features", [b"3"], delay=timedelta(milliseconds=50))
            messages = await stored(client, "features", 3)
        sends = spans.named("send features")
        found = {message.value: message for message in messages}
        assert again.offset == found[b"2"].offset
        for value, sent in zip((b"1", b"2", b"3"), (sends[0], sends[1], sends[3]), strict=True):
            assert context_of(found[value]) == (sent.context.trace_id, sent.context.span_id)
        assert found[b"1"].header("a") == b"b"
        assert (found[b"2"].key, found[b"2"].header("mansio-priority")) == (b"k", b"high")

    run(scenario)


@pytest.mark.full
def test_span_that_is_not_sampled_adds_no_header(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with traced(broker) as client:
            with trace.use_span(NonRecordingSpan(NOT_SAMPLED)):
                await client.publish("unsampled", b"1")
                await client.publish_many("unsampled", [b"2", b"3"])
            assert [message.headers for message in await stored(client, "unsampled")] == [()] * 3
        assert not spans.named("send unsampled")

    run(scenario)


@pytest.mark.full
def test_failed_call_ends_its_span_with_the_error(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with traced(broker) as client:
            with pytest.raises(UnknownTopicOrPartition):
                await client.publish("orders", b"1", partition=99)
            with pytest.raises(ValueError, match="delay"):
                await client.publish("orders", b"1", delay=-1)
        first, second = spans.named("send orders")
        assert first.status.status_code is second.status.status_code is StatusCode.ERROR
        assert (first.attributes or {})["error.type"] == "UnknownTopicOrPartition"
        assert (second.attributes or {})["error.type"] == "ValueError"
        assert spans.metric(
            "messaging.client.sent.messages",
            messaging_destination_name="orders",
            error_type="UnknownTopicOrPartition",
        )

    run(scenario)


@pytest.mark.full
def test_record_that_the_broker_refuses_ends_the_span_of_send(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with traced(broker) as client:
            await client.admin.create_topic("small", config={"max.message.bytes": "200"})
            delivery = await client.producer().send("small", bytes(2_000))
            with pytest.raises(MansioError):
                await delivery
        (sent,) = spans.named("send small")
        assert sent.status.status_code is StatusCode.ERROR

    run(scenario)


# -- receiving --------


@pytest.mark.full
def test_poll_is_linked_to_the_creation_contexts_of_its_messages(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with traced(broker) as client:
            await client.publish_many("polled", [b"1", b"2", b"3"])
            await client.publish("polled", b"4")
            await client.publish("polled", b"5", headers={"traceparent": b"no context"})
            spans_sent = spans.named("send polled")
            with spans.tracer.start_as_current_span("job") as job:
                messages = [
                    message async for message in client.consume("polled", group="readers", to_end=True)
                ]
            polls = spans.named("poll polled")
        assert len(messages) == 5
        assert [each for poll in polls for each in linked(poll)] == [id_of(sent) for sent in spans_sent[:2]]
        assert all(poll.kind is SpanKind.CLIENT for poll in polls)
        assert all(poll.parent is not None and poll.parent.span_id == id_of(job) for poll in polls)
        attributes = dict(polls[0].attributes or {})
        assert attributes["messaging.operation.type"] == "receive"
        assert attributes["messaging.consumer.group.name"] == "readers"
        consumed = spans.metric("messaging.client.consumed.messages", messaging_destination_name="polled")
        assert consumed.value == 5

    run(scenario)


@pytest.mark.full
def test_links_of_a_span_are_bounded(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with traced(broker) as client:
            producer = client.producer()
            for number in range(LINKS_MAX + 50):
                await producer.send("many", b"%d" % number)
            await producer.flush()
            await stored(client, "many")
        polls = spans.named("poll many")
        assert sum(len(poll.links) for poll in polls) >= LINKS_MAX
        assert max(len(poll.links) for poll in polls) <= LINKS_MAX

    run(scenario)


@pytest.mark.row("T5")
def test_handler_runs_in_a_span_of_the_publishers_trace(broker: mansio.Broker, spans: Spans) -> None:
    current: list[Any] = []

    async def handle(message: mansio.client.Leased) -> None:
        current.append(trace.get_current_span())
        if message.value == b"bad" and message.delivery_count == 1:
            raise RuntimeError("not yet")

    async def scenario() -> None:
        async with traced(broker) as client:
            await client.publish("work", b"good")
            await client.publish("work", b"bad")
            group = await group_of(client, "workers")
            async with running(client.receive("work", group=group), handle, concurrency=1):
                await eventually(lambda: len(spans.named("ack work")) == 2)
        good, bad = spans.named("send work")
        processed = spans.named("process work")
        assert len(processed) == 3
        for span in processed:
            assert span.kind is SpanKind.CONSUMER
            assert span.parent is not None
            assert linked(span) == [span.parent.span_id]
        assert Counter(span.parent.span_id for span in processed if span.parent) == {
            id_of(good): 1,
            id_of(bad): 2,
        }
        assert [id_of(span) for span in current] == [id_of(span) for span in processed]
        failed = [span for span in processed if span.status.status_code is StatusCode.ERROR]
        assert [dict(span.attributes or {})["error.type"] for span in failed] == ["RuntimeError"]
        assert [linked(span) for span in spans.named("retry work")] == [[id_of(bad)]]
        assert all(span.kind is SpanKind.CLIENT for span in spans.named("ack work"))
        assert spans.metric(
            "messaging.process.duration", messaging_destination_name="work", error_type="RuntimeError"
        )

    run(scenario)


@pytest.mark.full
def test_acknowledgements_are_named_by_their_outcome(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with traced(broker) as client:
            await client.publish_many("outcomes", [b"%d" % number for number in range(5)])
            group = await group_of(client, "outcomes")
            async with client.receive("outcomes", group=group) as receiver:
                first, second, third, *rest = await taken(receiver, 5)
                with spans.tracer.start_as_current_span("handler") as handler:
                    await first.ack()
                    await second.retry(after=60)
                    await third.extend()
                    await third.reject("no amount")
                await receiver.ack(rest)
                with pytest.raises(MansioError):
                    await first.ack()  # refused by the client: no request, no span
        (sent,) = spans.named("send outcomes")
        one, many = spans.named("ack outcomes")
        (retried,), (rejected,) = spans.named("retry outcomes"), spans.named("reject outcomes")
        for span in (one, many, retried, rejected):
            attributes = dict(span.attributes or {})
            assert span.kind is SpanKind.CLIENT
            assert linked(span) == [id_of(sent)]
            assert attributes["messaging.operation.type"] == "settle"
            assert attributes["messaging.operation.name"] == span.name.partition(" ")[0]
        for span in (one, retried, rejected):
            assert span.parent is not None
            assert span.parent.span_id == id_of(handler)
        assert dict(many.attributes or {})["messaging.batch.message_count"] == 2
        assert (
            spans.metric("messaging.client.operation.duration", messaging_operation_name="reject").count >= 1
        )

    run(scenario)


@pytest.mark.full
def test_lost_lease_is_the_error_of_its_span(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with traced(broker) as client:
            await client.publish("lost", b"1")
            group = await group_of(client, "lost")
            async with client.receive("lost", group=group) as receiver:
                (message,) = await taken(receiver, 1)
                await release_behind_its_back(client, group, message, receiver.member_id)
                with pytest.raises(LeaseLost):
                    await message.ack()
        (span,) = spans.named("ack lost")
        assert span.status.status_code is StatusCode.ERROR
        assert dict(span.attributes or {})["error.type"] == "LeaseLost"

    run(scenario)


# -- blocking client --------


def test_blocking_client_takes_over_the_span_of_its_caller(broker: mansio.Broker, spans: Spans) -> None:
    with mansio.blocking.connect(broker.address, tracing=True) as client:
        client.admin.alter_group_config("threads", {"share.auto.offset.reset": "earliest"})
        with spans.tracer.start_as_current_span("request") as request:
            client.publish("blocking", b"1")
            client.publish_many("blocking", [b"2", b"3"])
        handled: list[tuple[Any, str]] = []
        receiver = client.receive("blocking", group="threads")

        def handle(message: mansio.blocking.Leased) -> None:
            handled.append((trace.get_current_span(), threading.current_thread().name))
            message.ack()
            if len(handled) == 3:
                threading.Thread(target=receiver.stop).start()

        receiver.run(handle, concurrency=1)
    sends = spans.named("send blocking")
    assert [send.parent and send.parent.span_id for send in sends] == [id_of(request)] * 2
    processed = spans.named("process blocking")
    assert [id_of(span) for span, _ in handled] == [id_of(span) for span in processed]
    assert {name.startswith("mansio-handler") for _, name in handled} == {True}
    wait_until(lambda: len(spans.named("ack blocking")) == 3)
    acks = spans.named("ack blocking")
    assert {ack.parent and ack.parent.span_id for ack in acks} == {id_of(span) for span in processed}


# -- cost --------


@contextmanager
def counted_calls(part: str) -> Iterator[Counter[str]]:
    """Count the calls of Python functions in files whose path contains `part`, on this thread."""
    found: Counter[str] = Counter()

    def on_event(frame: Any, event: str, _: Any) -> None:
        if event == "call" and part in frame.f_code.co_filename:
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(on_event)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.full
def test_cost_of_a_call_does_not_depend_on_its_records(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with traced(broker) as client:
            await client.publish("costs", b"warm up")
            counts = []
            for count in (1, 10, 1_000):
                with counted_calls("/opentelemetry/") as calls:
                    await client.publish_many("costs", [b"value"] * count)
                counts.append(calls)
            assert counts[0] == counts[1] == counts[2]
            assert counts[0]["TraceContextTextMapPropagator.inject"] == 1
            consumer = client.consume("costs", start=1, to_end=True)
            with counted_calls("/opentelemetry/") as calls:
                received = [message async for message in consumer]
            assert len(received) == 1_011
            assert calls["TraceContextTextMapPropagator.extract"] <= 3  # the three contexts

    run(scenario)


def test_client_that_is_not_traced_never_calls_opentelemetry(broker: mansio.Broker, spans: Spans) -> None:
    async def scenario() -> None:
        async with mansio.connect(broker.address) as client:
            group = await group_of(client, "plain")
            with counted_calls("telemetry/") as calls, spans.tracer.start_as_current_span("request"):
                calls.clear()
                await client.publish_many("plain", [b"1", b"2"])
                await client.publish("plain", b"3")
                async with client.receive("plain", group=group) as receiver:
                    messages = await taken(receiver, 3)
                    await receiver.ack(messages)
                assert not calls
            assert {message.headers for message in messages} == {()}
        assert [span.name for span in spans.all()] == ["request"]

    run(scenario)
