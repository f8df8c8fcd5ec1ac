#!/bin/sh
# Install what pipelines need into .venv: PySpark, pyarrow, pyiceberg, and a Java where the machine has none that Spark
# takes. Only adds packages and does not touch Mansio's own installation, so a broker may run from .venv meanwhile.
# Touches .venv/.spark last.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python

extras="spark avro jsonschema registry"
if "$python" -c 'from mansio.spark.session.java import find_java; print("Java", find_java().version)'; then
    :
else
    extras="$extras java"
    echo "No Java that Spark takes: pip brings one"
fi

# Their requirements, as pyproject.toml has them.
requirements=.venv/.spark.requirements
# shellcheck disable=SC2086 # the extras are words
"$python" - $extras >"$requirements" <<'PYTHON'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
print("\n".join(requirement for extra in sys.argv[1:] for requirement in extras[extra]))
PYTHON
"$python" -m pip --disable-pip-version-check install --progress-bar off --constraint constraints.txt \
    --requirement "$requirements"
touch .venv/.spark
