#!/usr/bin/env bash
# Unpack the Debian packages that tests use into .tools/, without root and without touching the system:
#   tools/debian_tools.sh kcat
# For each package: .tools/bin/NAME runs it with the libraries unpacked beside it. What the system already has is
# used from there. apt gets a state directory of its own, because the system's lists may be missing or root's.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$PWD/.tools
mkdir -p "$tools/bin" "$tools/root"

missing=()
for name in "$@"; do
    if [ -x "$tools/bin/$name" ]; then
        continue
    elif system=$(command -v "$name"); then
        ln -sf "$system" "$tools/bin/$name"
    else
        missing+=("$name")
    fi
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
# A simulated installation names exactly the packages this system lacks, shared libraries included.
mapfile -t packages < <("${apt[@]}" --simulate --no-install-recommends install "${missing[@]}" | awk '$1 == "Inst" {print $2}')
(cd "$state/deb" && "${apt[@]}" download "${packages[@]}")
for package in "$state"/deb/*.deb; do
    dpkg-deb -x "$package" "$tools/root"
done

# Libraries lie in usr/lib/<triplet>; some (lapack's kind) one directory deeper.
libraries=$(find "$tools/root" -name '*.so.*' -printf '%h\n' | sort -u | paste -sd:)
for name in "${missing[@]}"; do
    program=$(find "$tools/root/usr" -path "*bin/$name" -print -quit)
    if [ -z "$program" ]; then
        echo "The package $name has no program $name" >&2
        exit 1
    fi
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "%s" "$@"\n' \
        "$libraries" "$program" >"$tools/bin/$name"
    chmod +x "$tools/bin/$name"
    if LD_LIBRARY_PATH=$libraries ldd "$program" | grep 'not found' >&2; then
        rm "$tools/bin/$name"
        exit 1
    fi
done
rm -rf "$state"
