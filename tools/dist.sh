#!/bin/sh
# Build the source distribution and, from that, the wheel of this version: tools/dist.sh DIRECTORY. Two builds of one
# commit have the same bytes: all times in the files are that of the last commit ($SOURCE_DATE_EPOCH, if it is set), and
# the build tools are those of .venv, or of $PYTHON.
set -eu
cd "$(dirname "$0")/.."
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
umask 022
exec "${PYTHON:-.venv/bin/python}" -m build --no-isolation --outdir "$1" . >/dev/null
