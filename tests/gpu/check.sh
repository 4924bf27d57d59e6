#!/bin/sh
# The CUDA paths, on a machine with at least one GPU, in under five minutes:
#     tests/gpu/check.sh [PYTHON]
# With several GPUs their slots are checked, too. Needs the package installed (pip install -e .). Prints what it finds; exit code 0 when all hold.
set -eu
cd "$(dirname "$0")/../.."
python=${1:-python3}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
exec "$python" -m tests.gpu.check "$out"
