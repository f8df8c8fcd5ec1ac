#!/usr/bin/env bash
# Fetch Spark's own Kafka connector into .tools/spark-kafka/, as jars for `spark.jars`. Needs java and mvn on the PATH,
# and a Maven repository that mvn can reach. Does nothing when they are there.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$PWD/.tools/spark-kafka

for program in java mvn; do
    command -v "$program" >/dev/null || {
        echo "spark_kafka.sh: $program is not on the PATH: install openjdk-17-jre-headless (or newer) and maven" >&2
        exit 1
    }
done
if [ -e "$target/.fetched" ] && [ "$target/.fetched" -nt tools/spark_kafka.pom.xml ]; then
    exit 0
fi
rm -rf "$target"
mkdir -p "$target"
mvn --quiet --batch-mode -Dstyle.color=never --file tools/spark_kafka.pom.xml dependency:copy-dependencies \
    -DincludeScope=runtime -DoutputDirectory="$target"
touch "$target/.fetched"
