#!/usr/bin/env bash
# A Python that this Debian release does not have, from a newer one: tools/debian_python.sh 3.14 [SUITE]
# Unpacks it, with the libraries and the libc it needs, into .tools/pythonVERSION/, and prints the path of a program that
# runs a command where /usr/bin/pythonVERSION exists. That program mounts the unpacked /usr over the system's own, in a
# mount namespace of its own, so it needs root; the system is not changed. Programs of the system run there with the
# newer libc, which supports them. The packages come from the machine's own apt sources, with another suite; apt gets
# lists and a state of its own. What is missing is said on standard error; the exit code is 1 then.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1
suite=${2:-forky}
place=$PWD/.tools/python$version
program=$place/run

unavailable() {
    echo "No Python $version from Debian $suite: $1" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || unavailable "only root can mount it"
for needed in apt-get dpkg-deb unshare mount; do
    command -v $needed >/dev/null || unavailable "there is no $needed"
done
if [ -x "$program" ]; then
    "$program" "/usr/bin/python$version" -c 'import ensurepip, ssl, venv' || unavailable "$program does not run it"
    echo "$program"
    exit
fi

codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
archive=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT) $(LABEL)' |
    awk -v release="$codename" '$2 == release && $3 == "main" && !/Debian-Security/ {print $1; exit}')
[ -n "$archive" ] || unavailable "the apt sources have no archive of this system's release (${codename:-unknown})"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keys ] || unavailable "there is no $keys"

state=$place/apt
rm -rf "$place"
mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$place/root/usr" "$state/parts"
echo "deb [signed-by=$keys] $archive $suite main" >"$state/sources.list"
: >"$state/status" # an empty system: every library is unpacked, in the version that belongs to the others
# The system's hooks around an update (a container's clean-up, say) are not for this directory.
cat >"$state/apt.conf" <<'CONF'
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Post-Invoke;
CONF
apt=(apt-get -qq -c "$state/apt.conf" -o "Dir::State=$state" -o "Dir::State::status=$state/status"
    -o "Dir::Cache=$state/cache" -o "Dir::Etc::SourceList=$state/sources.list" -o "Dir::Etc::SourceParts=$state/parts"
    -o "APT::Sandbox::User=root" -o "Debug::NoLocking=1")
echo "Fetching Python $version of Debian $suite into .tools/" >&2
"${apt[@]}" update >&2 || unavailable "its package lists cannot be fetched"
"${apt[@]}" -y --no-install-recommends --download-only install "python$version" "python$version-venv" >&2 ||
    unavailable "its packages cannot be fetched"
for package in "$state"/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$place/root"
done
rm -rf "$state"

cat >"$program" <<RUN
#!/bin/sh
exec unshare --mount sh -c 'mount -t overlay overlay -o "lowerdir=\$0/usr:/usr" /usr && exec "\$@"' "$place/root" "\$@"
RUN
chmod +x "$program"
"$program" "/usr/bin/python$version" -c 'import ensurepip, ssl, venv' ||
    { rm "$program"; unavailable "an overlay of /usr cannot be mounted, or the interpreter does not start"; }
echo "$program"
