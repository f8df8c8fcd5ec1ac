#!/bin/sh
# Wait until Spark is installed (tools/background.sh spark tools/install_spark.sh), with one moving line about it; when
# that failed, show what pip said. On no terminal: a line at the beginning and one at the end.
set -eu
cd "$(dirname "$0")/.."
running=.venv/.spark.running
started=$(date +%s)

alive() { # whether that process is there and more than a zombie, which a container may keep for ever
    kill -0 "$1" 2>/dev/null && ! grep -q ') Z ' "/proc/$1/stat" 2>/dev/null
}

last_line() {
    tail -n 1 .venv/.spark.log 2>/dev/null | tr -d '\r' | cut -c "1-$1"
}

[ -d "$running" ] && [ ! -t 1 ] && echo "Installing Spark into .venv (about 90 s; the log is .venv/.spark.log)"
while [ -d "$running" ]; do
    seconds=$(($(date +%s) - started))
    if [ -s "$running/pid" ]; then
        goes_on=$(alive "$(cat "$running/pid" 2>/dev/null)" && echo yes || echo no)
    else
        goes_on=$([ "$seconds" -lt 10 ] && echo yes || echo no) # it has not written its id yet
    fi
    if [ "$goes_on" = no ] && [ -d "$running" ]; then
        [ -f .venv/.spark.exit ] || echo 1 >.venv/.spark.exit
        rm -rf "$running"
        break
    fi
    if [ -t 1 ]; then
        printf '\r\033[K Installing Spark into .venv  %3d s of about 90  %s' "$seconds" "$(last_line 36)"
    fi
    sleep 0.5
done
[ -t 1 ] && printf '\r\033[K'

code=$(cat .venv/.spark.exit 2>/dev/null || echo 1)
if [ "$code" != 0 ]; then
    tail -n 15 .venv/.spark.log >&2 || true
    echo "Spark could not be installed into .venv; the whole log is .venv/.spark.log. Try again: make setup" >&2
    exit 1
fi
