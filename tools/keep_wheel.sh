#!/bin/sh
# Build the wheel of this version and keep it for the upgrade tests (tests/system/release/test_upgrade.py). To be
# repeated until the release is tagged; afterwards the kept wheel of that version must not change any more.
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/mansio/version.py)
case $version in *.dev*)
    echo "Version $version is a development version: only the wheels of releases are kept" >&2
    exit 1
esac
if git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null; then
    echo "Version $version is tagged: its wheel is kept as it is" >&2
    exit 1
fi
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
tools/dist.sh "$built"
mkdir -p tests/fixtures/wheels
cp "$built"/mansio_mq-"$version"-py3-none-any.whl tests/fixtures/wheels/
ls -l tests/fixtures/wheels
