#!/usr/bin/env bash
# Build an sdist and, from it, a wheel that installs without a compiler; repair it for other machines and check it. They
# go to dist/. The tools of the extra `package` are installed into an environment of their own.
#   release/make_wheel.sh                      for this Python
#   release/try_wheel.sh dist/*.whl 2.6 2.15   then: does it work with these releases of torch?
set -euo pipefail
cd "$(dirname "$0")/.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
python3 -m venv "$made/tools"
python3 .ci/extras.py package > "$made/tools.txt"
export PATH="$made/tools/bin:$PATH"
pip install -q --disable-pip-version-check -r "$made/tools.txt"
KVPAGE_CUDA=${KVPAGE_CUDA:-OFF} python -m build --outdir "$made" .
mkdir -p dist
cp "$made"/*.tar.gz dist/
python -m auditwheel repair --wheel-dir dist "$made"/*.whl
python release/check_wheel.py dist
