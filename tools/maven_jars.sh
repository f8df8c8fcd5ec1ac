#!/usr/bin/env bash
# Fetch the jars that tools/NAME.pom.xml names into .tools/NAME/, for `spark.jars`: `maven_jars.sh spark-kafka`. Needs java
# and mvn on the PATH, and a Maven repository that mvn can reach. Does nothing when they are there.
set -euo pipefail
cd "$(dirname "$0")/.."
pom=tools/${1//-/_}.pom.xml
target=$PWD/.tools/$1

for program in java mvn; do
    command -v "$program" >/dev/null || {
        echo "maven_jars.sh: $program is not on the PATH: install openjdk-17-jre-headless (or newer) and maven" >&2
        exit 1
    }
done
if [ -e "$target/.fetched" ] && [ "$target/.fetched" -nt "$pom" ]; then
    exit 0
fi
rm -rf "$target"
mkdir -p "$target"
mvn --quiet --batch-mode -Dstyle.color=never --file "$pom" dependency:copy-dependencies \
    -DincludeScope=runtime -DoutputDirectory="$target"
touch "$target/.fetched"
