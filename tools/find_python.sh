#!/bin/sh
# Print the path of a Python interpreter that is new enough (3.11) and can make virtual environments; else say so.
# $PYTHON, when set, is the only candidate.
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
    path=$(command -v "$candidate") || continue
    if "$path" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "$path"
        exit 0
    fi
done
echo "Mansio needs Python 3.11 or newer with its venv module (on Debian: apt-get install python3 python3-venv)." >&2
echo "None was found on PATH; name one with PYTHON=/path/to/python3.11 make setup" >&2
exit 1
