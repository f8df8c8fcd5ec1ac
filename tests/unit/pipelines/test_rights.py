"""The page about pipelines lists the least rights of each job, and a role of a pipeline has what its job needs."""

from __future__ import annotations

import pytest

from mansio.pipelines.rights import Job, least_rights, rights_of
from mansio.state.authorization.acls import Operation, ResourceType
from support.paths import ROOT

PAGE = ROOT / "docs/how-to/pipelines.md"


@pytest.mark.parametrize("job", Job)
def test_the_page_lists_the_rights_of_each_job(job: Job) -> None:
    texts = [
        f"`{str(right).partition(' on ')[0]}` on {str(right).partition(' on ')[2]}"
        for right in least_rights(job)
    ]
    row = f"| `{job}` | {'; '.join(texts) or 'none: it does not use brokers'} |"
    assert row in PAGE.read_text(), row


def test_names_of_options_replace_those_of_the_table() -> None:
    rights = rights_of(Job.RUN_TO_TOPIC, ["a", "b"], ["c"], "p")
    assert list(map(str, rights)) == [
        "READ on topic a",
        "READ on topic b",
        "READ on group mansio.pipeline.p",
        "WRITE on topic c",
        "WRITE on transactional-id mansio-spark:...",
    ]
    assert rights[-1].command("User:x") == (
        "mansio acl add User:x --operation WRITE --transactional-id mansio-spark: --prefix"
    )
    assert {right.name for right in rights_of(Job.RUN_TO_TOPIC)} == {"mansio-spark:"}
    assert rights_of(Job.READ, ["t"]) == [(Operation.READ, ResourceType.TOPIC, "t", False)]
