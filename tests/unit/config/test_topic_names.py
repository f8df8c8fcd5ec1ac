"""Derived names of topics: legal, and different for different names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mansio.celery.names import topic_of_exchange, topic_of_queue
from mansio.config.topic_names import dead_letter_topic_of
from mansio.metadata.topic_plan import check_topic_name

LEGAL = st.text("ab._-", min_size=1, max_size=4).flatmap(
    lambda part: st.integers(1, 249).map(lambda length: (part * 249)[:length])
)


@given(LEGAL, LEGAL)
def test_dead_letter_topics_of_any_topics_are_legal_and_different(one: str, other: str) -> None:
    check_topic_name(dead_letter_topic_of(one))
    assert (dead_letter_topic_of(one) == dead_letter_topic_of(other)) == (one == other)


@given(LEGAL | st.text(min_size=1, max_size=300), LEGAL | st.text(min_size=1, max_size=300))
def test_topics_of_any_queues_are_legal_with_their_dead_letter_topics_and_different(
    one: str, other: str
) -> None:
    for topic in (topic_of_queue(one), topic_of_exchange(one)):
        check_topic_name(topic)
        assert dead_letter_topic_of(topic) == f"dlq.{topic}"
    assert (topic_of_queue(one) == topic_of_queue(other)) == (one == other)
    assert topic_of_queue(one) != topic_of_exchange(other)


def test_names_of_queues_are_what_they_were() -> None:
    assert topic_of_queue("celery") == "celery"
    assert topic_of_queue("a/b") == "a-b-0debd2558bca8fa0"
    assert topic_of_queue("dlq.x") == "queue.dlq.x-1324dfb0fa6ed2bb"
    assert topic_of_queue("q" * 201) == "q" * 200 + "-81e372016a1984e1"
    assert topic_of_exchange("news") == "exchange.news"
