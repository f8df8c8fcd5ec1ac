#!/usr/bin/env bash
# Unpack the Debian packages that tests and the peers' benchmark use into .tools/, without root and without touching
# the system:
#   tools/debian_tools.sh kcat postgresql:initdb,postgres
# An argument is a package, or a package and the programs wanted of it. For each program: .tools/bin/NAME runs it with
# the libraries unpacked beside it. What the system already has is used from there. A package that cannot be had is
# told, the others are unpacked all the same; the exit code is 1 then. apt gets a state directory of its own, because
# the system's lists may be missing or root's.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/.tools
mkdir -p "$tools/bin" "$tools/root"

installed() { # the system's own PROGRAM, where Debian may put one
    command -v "$1" || compgen -G "/usr/lib/postgresql/*/bin/$1" | tail -1 | grep .
}

missing=()
for wanted in "$@"; do
    for name in $(echo "${wanted#*:}" | tr , ' '); do
        if [ -x "$tools/bin/$name" ]; then
            continue
        elif system=$(installed "$name"); then
            ln -sf "$system" "$tools/bin/$name"
        else
            missing+=("$wanted")
            break
        fi
    done
done
[ ${#missing[@]} -gt 0 ] || exit 0

for program in apt-get dpkg-deb; do
    if ! command -v "$program" >/dev/null; then
        echo "No $program here, so these must be installed by hand for the tests that use them: ${missing[*]}" >&2
        exit "${CI:+1}"
    fi
done

state=$tools/apt
mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/deb"
# The system's hooks around an update (a container's clean-up, say) are root's and not for us.
echo '#clear APT::Update::Pre-Invoke; #clear APT::Update::Post-Invoke; #clear APT::Update::Post-Invoke-Success;' |
    tr ';' '\n' | sed '/./s/$/;/' >"$state/apt.conf"
apt=(apt-get -qq -c "$state/apt.conf" -o "Dir::State=$state" -o "Dir::State::status=/var/lib/dpkg/status"
    -o "Dir::Cache=$state/cache" -o "APT::Sandbox::User=")

echo "Fetching ${missing[*]} into .tools/ (no root needed)"
"${apt[@]}" update
failed=0
packages=()
for wanted in "${missing[@]}"; do
    # A simulated installation names exactly the packages this system lacks, shared libraries included.
    if planned=$("${apt[@]}" --simulate --no-install-recommends install "${wanted%%:*}"); then
        mapfile -t -O ${#packages[@]} packages < <(awk '$1 == "Inst" {print $2}' <<<"$planned")
    else
        failed=1
    fi
done
[ ${#packages[@]} -gt 0 ] || exit 1
mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
(cd "$state/deb" && "${apt[@]}" download "${packages[@]}")
for package in "$state"/deb/*.deb; do
    dpkg-deb -x "$package" "$tools/root"
done

# Libraries lie in usr/lib/<triplet>; some (lapack's kind) one directory deeper.
libraries=$(find "$tools/root" -name '*.so.*' -printf '%h\n' | sort -u | paste -sd:)
for wanted in "${missing[@]}"; do
    for name in $(echo "${wanted#*:}" | tr , ' '); do
        program=$(find "$tools/root/usr" -path "*bin/$name" -print -quit)
        if [ -z "$program" ]; then
            echo "The package ${wanted%%:*} has no program $name" >&2
            failed=1
            continue
        fi
        printf '#!/bin/sh\nLD_LIBRARY_PATH="%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "%s" "$@"\n' \
            "$libraries" "$program" >"$tools/bin/$name"
        chmod +x "$tools/bin/$name"
        if LD_LIBRARY_PATH=$libraries ldd "$program" 2>/dev/null | grep 'not found' >&2; then
            rm "$tools/bin/$name"
            failed=1
        fi
    done
done
rm -rf "$state"
exit $failed
