#!/usr/bin/env bash
# Fetch Apache Kafka's own command line tools into .tools/java/, as jars that `java -cp '.tools/java/*'` runs. Needs
# java (17 or newer) and mvn on the PATH, and a Maven repository that mvn can reach. Does nothing when they are there.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$PWD/.tools/java

for program in java mvn; do
    command -v "$program" >/dev/null || {
        echo "java_tools.sh: $program is not on the PATH: install openjdk-17-jre-headless (or newer) and maven" >&2
        exit 1
    }
done
if [ -e "$target/.fetched" ] && [ "$target/.fetched" -nt tools/java_tools.pom.xml ]; then
    exit 0
fi
rm -rf "$target"
mkdir -p "$target"
mvn --quiet --batch-mode --file tools/java_tools.pom.xml dependency:copy-dependencies \
    -DincludeScope=runtime -DoutputDirectory="$target"
touch "$target/.fetched"
