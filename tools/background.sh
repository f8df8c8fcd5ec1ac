#!/bin/sh
# Start a command in the background, once: tools/background.sh NAME COMMAND [ARGUMENT...]
# Its output goes to .venv/.NAME.log, its process id to .venv/.NAME.running/pid while it runs, its exit code to
# .venv/.NAME.exit when it has ended. Does nothing while one of that name runs: two targets, or two people, may ask.
set -eu
cd "$(dirname "$0")/.."
name=$1
shift
running=.venv/.$name.running

alive() { # whether that process is there and more than a zombie, which a container may keep for ever
    kill -0 "$1" 2>/dev/null && ! grep -q ') Z ' "/proc/$1/stat" 2>/dev/null
}

if ! mkdir "$running" 2>/dev/null; then
    if [ ! -s "$running/pid" ]; then
        sleep 1 # another one is just about to write it
    fi
    if alive "$(cat "$running/pid" 2>/dev/null)"; then
        exit 0
    fi
    echo "What was begun as '$name' before was cut short; beginning again" >&2
    mkdir -p "$running"
    rm -f "$running/pid" # of the process that is gone: who waits would take it for the new one
fi
rm -f ".venv/.$name.exit"

# A session of its own where there is one: Ctrl-C in the foreground leaves this alone.
detach=$(command -v setsid || true)
# shellcheck disable=SC2016 # expanded by the inner shell
nohup $detach sh -c '
    running=$1 exit=$2
    shift 2
    echo $$ >"$running/pid"
    code=0
    "$@" || code=$?
    echo "$code" >"$exit.part" && mv "$exit.part" "$exit"
    rm -rf "$running"
' background "$running" ".venv/.$name.exit" "$@" >".venv/.$name.log" 2>&1 </dev/null &
