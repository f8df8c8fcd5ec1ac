#!/usr/bin/env bash
# Fetch the servers that `make bench-peers` measures beside Mansio into .tools/, without root:
#   Debian packages (tools/debian_tools.sh); the jars of Apache Kafka and ElasticMQ where Maven is; a NATS server that can sync before it
#   acknowledges (2.10, Debian 12 has 2.9) where Go is.
# What cannot be had is told, and measured by nobody: the exit code is 0 all the same.
set -uo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/.tools
nats_version=v2.10.27
nats_scheduling_version=v2.15.2 # delivers messages at a time (`bench.delay_peers`), which needs 2.12

missing() { echo "Not fetched: $*" >&2; }

# Each package by itself: one that this system's Debian does not have costs the others nothing.
tools/debian_tools.sh redis-server beanstalkd nats-server strace postgresql:initdb,postgres rabbitmq-server:epmd \
    || missing "not every Debian package was found"

# jars NAME DIRECTORY: what bench/peers/DIRECTORY.pom.xml names, into .tools/DIRECTORY.
jars() {
    compgen -G "$tools/$2/$2*.jar" >/dev/null && return
    if command -v mvn >/dev/null; then
        echo "Fetching $1 into .tools/$2"
        mvn --quiet --batch-mode -Dstyle.color=never --file "bench/peers/$2.pom.xml" dependency:copy-dependencies \
            -DincludeScope=runtime -DoutputDirectory="$tools/$2.part" && mv "$tools/$2.part" "$tools/$2" ||
            missing "$1, as Maven could not reach its repository"
    else
        missing "$1, as there is no Maven (mvn)"
    fi
}

jars "Apache Kafka" kafka
jars ElasticMQ elasticmq # for `bench.sqs`

# nats VERSION DIRECTORY: build a NATS server into .tools/DIRECTORY.
nats() {
    [ -x "$tools/$2/nats-server" ] && return
    if command -v go >/dev/null; then
        echo "Building NATS $1 into .tools/$2"
        # The modules and Go's cache are needed once and thrown away.
        GOBIN=$tools/$2 GOPATH=$tools/go GOCACHE=$tools/go/cache GOFLAGS=-modcacherw GOTOOLCHAIN=local \
            go install "github.com/nats-io/nats-server/v2@$1" 2>"$tools/go.log" ||
            missing "NATS $1, as Go could not build it (see .tools/go.log)"
        rm -rf "$tools/go"
    else
        missing "NATS $1, as there is no Go; Debian's is measured"
    fi
}

nats "$nats_version" nats
nats "$nats_scheduling_version" nats-scheduling
exit 0
