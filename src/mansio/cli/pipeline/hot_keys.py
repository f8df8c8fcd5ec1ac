"""`mansio pipeline hot-keys TOPIC`: most frequent keys, partition skew, and advice.

Invariants:
* The command changes nothing. The exit code is 0 also for a skewed topic.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mansio.cli.pipeline import ConfOption, MasterOption, RemoteOption, SkipCheckOption, start_session
from mansio.cli.support.common import DEFAULT_BOOTSTRAP_SERVERS, BootstrapServersOption, connect, run
from mansio.cli.support.formatting import Output, OutputOption, show_json, show_table, text_or_base64

if TYPE_CHECKING:
    from mansio.pipelines.hot_keys import HotKeys, SkewAssessment


def register(app: typer.Typer) -> None:
    """Add the command to `mansio pipeline`."""
    app.command("hot-keys")(hot_keys)


def hot_keys(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic whose keys are counted.")],
    top: Annotated[
        int, typer.Option("--top", min=1, max=1000, metavar="N", help="Number of keys to show.")
    ] = 20,
    by_bytes: Annotated[
        bool, typer.Option("--by-bytes", help="Measure the bytes of values instead of the number of records.")
    ] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Also write the chart to this file, as SVG.")
    ] = None,
    master: MasterOption = None,
    remote: RemoteOption = None,
    conf: ConfOption = None,
    skip_check: SkipCheckOption = False,
    output: OutputOption = Output.TABLE,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Find the keys with the most records (or bytes), and whether the partitions are evenly loaded.

    Counts all current records exactly. Gives advice if a key or a partition has a disproportionate share.
    """

    async def partitions() -> int:
        async with connect(bootstrap_servers) as client:
            return len((await client.admin.describe_topic(topic)).partitions)

    partition_count = run(partitions())

    spark = start_session(
        master,
        f"mansio hot-keys {topic}",
        remote=remote,
        bootstrap_servers=bootstrap_servers,
        skip_check=skip_check,
        conf=conf,
    )
    from mansio.pipelines.bar_charts import render_svg
    from mansio.pipelines.hot_keys import assess_skew, count_topic, hot_key_charts

    found = count_topic(spark, topic, bootstrap_servers, partition_count, top=top, measures_bytes=by_bytes)
    assessment = assess_skew(found)
    if plot is not None:
        with open(plot, "w", encoding="utf-8") as file:
            file.write(render_svg(hot_key_charts(found, assessment, top)))
    if output is Output.JSON:
        show_json(_as_json(topic, found, assessment))
    else:
        _show(found, assessment, top)


def _as_json(topic: str, found: HotKeys, assessment: SkewAssessment) -> dict[str, Any]:
    keys = []
    for one in found.top:
        text, encoding = text_or_base64(one.key)
        keys.append({**asdict(one), "key": text, "key_encoding": encoding, "is_hot": one in assessment.hot})
    return {
        "topic": topic,
        "records": found.records,
        "bytes": found.bytes if found.measures_bytes else None,
        "keys": found.keys,
        "skew": round(found.skew, 4),
        "is_skewed": assessment.is_skewed,
        "top": keys,
        "partitions": [asdict(one) for one in found.partitions],
        "advice": list(assessment.advice),
    }


def _show(found: HotKeys, assessment: SkewAssessment, top: int) -> None:
    from mansio.pipelines.bar_charts import render_text
    from mansio.pipelines.hot_keys import hot_key_charts

    for chart in hot_key_charts(found, assessment, top):
        print("\n".join(render_text(chart)))
        print()
    rows = [
        ("records", f"{found.records:,}"),
        ("different keys", f"{found.keys:,}"),
        ("partitions", f"{len(found.partitions):,}"),
        ("busiest partition, times the mean", f"{found.skew:.2f}"),
        ("hot keys", f"{len(assessment.hot):,}"),
    ]
    show_table(("what", "value"), rows)
    print()
    for line in assessment.advice or ("nothing stands out",):
        print(f"- {line}")
