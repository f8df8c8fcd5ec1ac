#!/bin/sh
# Print the path of a Python interpreter that is new enough (3.11) and can make virtual environments; else say so.
# Usage: find_python.sh [VERSION]. With VERSION (3.12) only that one is accepted, also from pyenv and uv.
# An interpreter that was built with optimisation (PGO, LTO) is preferred: it runs the broker 10 to 30 % faster.
# $PYTHON, when set, is the only candidate.
wanted=$1

# Whether "$1" can be used; with "$2" = optimised also whether its build was optimised. Distributions build their own
# interpreter (prefix /usr) with optimisation and remove the options from the configuration that it reports.
accepts() {
    "$1" -c '
import ensurepip, sys, sysconfig, venv
options = " ".join(str(sysconfig.get_config_var(name)) for name in ("CONFIG_ARGS", "PY_CORE_LDFLAGS", "PY_CORE_CFLAGS"))
optimised = sys.base_prefix == "/usr" or "--enable-optimizations" in options or "-flto" in options
version = "%d.%d" % sys.version_info[:2]
sys.exit(
    sys.version_info < (3, 11)
    or (sys.argv[1] not in ("", version))
    or (sys.argv[2] == "optimised" and not optimised)
)' "$wanted" "$2" 2>/dev/null
}

candidates() {
    if [ -n "$PYTHON" ]; then
        command -v "$PYTHON"
        return
    fi
    for name in ${wanted:+python$wanted} python3 python3.13 python3.12 python3.11 python3.14 python; do
        (IFS=:; for directory in $PATH; do [ -x "$directory/$name" ] && echo "$directory/$name"; done)
    done
    if [ -n "$wanted" ]; then
        ls -d "$HOME"/.pyenv/versions/"$wanted"*/bin/python "$HOME"/.local/share/uv/python/*"$wanted"*/bin/python3 2>/dev/null
    fi
}

for build in optimised any; do
    for path in $(candidates); do
        if accepts "$path" $build; then
            echo "$path"
            exit 0
        fi
    done
done
if [ -n "$wanted" ]; then
    echo "No Python $wanted with its venv module was found." >&2
    exit 1
fi
echo "Mansio needs Python 3.11 or newer with its venv module (on Debian: apt-get install python3 python3-venv)." >&2
echo "None was found on PATH; name one with PYTHON=/path/to/python3.11 make setup" >&2
exit 1
