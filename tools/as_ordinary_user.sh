#!/usr/bin/env bash
# Run a command in this clone as an ordinary user: tools/as_ordinary_user.sh COMMAND [ARGUMENT...]
# For root, the clone belongs to `nobody` while the command runs, and the command gets a home directory that is removed
# afterwards. Other users run the command themselves. Root does, too, and a line has the reason, where the ordinary user
# could not run it: a parent directory or the interpreter is closed to that user, or root may not become another one.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || exec "$@"

uid=$(id -u nobody 2>/dev/null || echo 65534)
gid=$(id -g nobody 2>/dev/null || echo 65534)
owner=$(stat -c %u:%g .)
home=
child=

# Signals are reset because a background command of a shell ignores SIGINT, and all its children would. A shell starts
# the command because setpriv itself still finds programs in directories that are closed to the user.
become=(env "--default-signal=INT,QUIT" setpriv "--reuid=$uid" "--regid=$gid" --clear-groups sh -c 'exec "$@"' -)

give_back() {
    [ -z "$home" ] || {
        chown -hR "$owner" .
        rm -rf "$home"
    } || true
}
trap give_back EXIT

stay_root() {
    echo "Running as root, not as an ordinary user: $1" >&2
    shift
    give_back
    exec "$@"
}

"${become[@]}" true 2>/dev/null || stay_root "setpriv cannot change the user here" "$@"
"${become[@]}" test -x "$(dirname "$PWD")" || stay_root "a directory above $PWD is closed to other users" "$@"
temporary=
for directory in "${TMPDIR:-/tmp}" /tmp; do
    if [ -z "$temporary" ] && "${become[@]}" test -w "$directory" -a -x "$directory"; then
        temporary=$directory
    fi
done
[ -n "$temporary" ] || stay_root "there is no temporary directory that other users may write" "$@"

# What pip needs of root's settings goes along; git trusts a clone whose .git belongs to another user (a worktree).
home=$(mktemp -d "$temporary/mansio-home.XXXXXX")
for settings in .config/pip/pip.conf .pip/pip.conf; do
    [ ! -f "${HOME:-/root}/$settings" ] || install -D "${HOME:-/root}/$settings" "$home/$settings"
done
printf '[safe]\n\tdirectory = *\n' >"$home/.gitconfig"
chown -hR "$uid:$gid" . "$home" || stay_root "the clone cannot be handed to another user" "$@"

become=(env -u XDG_CACHE_HOME -u XDG_CONFIG_HOME -u XDG_CONFIG_DIRS -u XDG_DATA_HOME -u XDG_STATE_HOME -u XDG_RUNTIME_DIR
    "HOME=$home" "TMPDIR=$temporary" "USER=nobody" "LOGNAME=nobody" "${become[@]}")
for program in "$1" git; do
    ! command -v "$program" >/dev/null || "${become[@]}" sh -c 'command -v "$1" >/dev/null' - "$program" ||
        stay_root "$program is closed to other users" "$@"
done
if [ -e .venv/bin/python ]; then
    "${become[@]}" .venv/bin/python -c '' 2>/dev/null || stay_root "the interpreter of .venv is closed to other users" "$@"
elif sh tools/find_python.sh >/dev/null 2>&1; then
    "${become[@]}" sh tools/find_python.sh >/dev/null 2>&1 ||
        stay_root "the only suitable Python is closed to other users" "$@"
fi

echo "Running as an ordinary user ($uid)"
trap 'kill -TERM "$child" 2>/dev/null || true' TERM HUP
trap : INT # the command gets it from the terminal, too
"${become[@]}" "$@" </dev/null &
child=$!
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ended the wait, not the command
    code=0
    wait "$child" || code=$?
done
exit "$code"
