#!/usr/bin/env bash
# Fetch the servers that `make bench-peers` measures beside Mansio into .tools/, without root:
#   Debian packages (tools/debian_tools.sh); the jars of Apache Kafka and ElasticMQ where Maven is; where Go is, a NATS server that can
#   sync before it acknowledges (2.10) and deliver messages at a time (2.12; Debian 12 has 2.9).
# A version other than the one named here is replaced. What cannot be had is told, and measured by nobody: the exit code is 0 all the same.
set -uo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/.tools
nats_version=v2.15.3
nats_scheduling_version=v2.15.3

missing() { echo "Not fetched: $*" >&2; }

# Each package by itself: one that this system's Debian does not have costs the others nothing.
tools/debian_tools.sh redis-server beanstalkd nats-server strace postgresql:initdb,postgres rabbitmq-server:epmd \
    || missing "not every Debian package was found"

# jars NAME DIRECTORY: what bench/peers/DIRECTORY.pom.xml names, into .tools/DIRECTORY.
jars() {
    cmp -s "bench/peers/$2.pom.xml" "$tools/$2/pom.xml" && return
    if command -v mvn >/dev/null; then
        echo "Fetching $1 into .tools/$2"
        rm -rf "$tools/$2" "$tools/$2.part"
        mvn --quiet --batch-mode -Dstyle.color=never --file "bench/peers/$2.pom.xml" dependency:copy-dependencies \
            -DincludeScope=runtime -DoutputDirectory="$tools/$2.part" &&
            cp "bench/peers/$2.pom.xml" "$tools/$2.part/pom.xml" && mv "$tools/$2.part" "$tools/$2" ||
            missing "$1, as Maven could not reach its repository"
    else
        missing "$1, as there is no Maven (mvn)"
    fi
}

jars "Apache Kafka" kafka
jars ElasticMQ elasticmq # for `bench.sqs`

# nats VERSION: build a NATS server into .tools/nats, with what the module proxy tells about the version in module.info.
nats() {
    grep -qs "\"$1\"" "$tools/nats/module.info" && return
    if command -v go >/dev/null; then
        echo "Building NATS $1 into .tools/nats"
        module=github.com/nats-io/nats-server/v2
        # The modules and Go's cache are needed once and thrown away.
        GOBIN=$tools/nats GOPATH=$tools/go GOCACHE=$tools/go/cache GOFLAGS=-modcacherw GOTOOLCHAIN=local \
            go install "$module@$1" 2>"$tools/go.log" &&
            cp "$tools/go/pkg/mod/cache/download/$module/@v/$1.info" "$tools/nats/module.info" ||
            missing "NATS $1, as Go could not build it (see .tools/go.log)"
        rm -rf "$tools/go"
    else
        missing "NATS $1, as there is no Go; Debian's is measured"
    fi
}

nats "$nats_version"
exit 0
