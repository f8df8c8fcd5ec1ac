"""Views per page in windows of ten minutes, and what becomes of late data.

    mansio pipeline run examples/pipelines/page_views.py --topic clicks --to-table page_views --warehouse lake

In: JSON such as {"page": "/cart", "at": "2024-05-01T10:00:00Z"}. A window is written once, when the watermark, five
minutes behind the newest click, has passed it. A click that arrives later is dropped, and counted as `late_rows` by
`mansio pipeline lag --output json` and as `mansio_pipeline_late_rows_total`. The records stay in the topic, so the same
file gives the complete numbers afterwards. The time range is that of the records' timestamps:

    mansio pipeline backfill examples/pipelines/page_views.py --topic clicks --from-time 2024-05-01 \
        --to-time 2024-05-02 --to-table page_views_complete --warehouse lake
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

CLICK = "page string, at timestamp"
LATENESS = "5 minutes"


def transform(frame: DataFrame) -> DataFrame:
    """Number of views of each page and window."""
    click = f.from_json(frame.value.cast("string"), CLICK)
    clicks = frame.select(click.alias("click")).select("click.*").withWatermark("at", LATENESS)
    views = clicks.groupBy(f.window("at", "10 minutes").alias("window"), "page").count()
    return views.select(f.col("window.start").alias("since"), "page", f.col("count").alias("views"))
