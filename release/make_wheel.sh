#!/usr/bin/env bash
# Build an sdist and, from it, a wheel; repair the wheel for other machines and check it. They go to dist/.
#   release/make_wheel.sh                      with this Python; needs `pip install 'kvpage[package]'`
#   release/try_wheel.sh dist/*.whl 2.6 2.15   then: does it work with these releases of torch?
set -euo pipefail
cd "$(dirname "$0")/.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
KVPAGE_CUDA=${KVPAGE_CUDA:-OFF} python -m build --outdir "$made" .
mkdir -p dist
cp "$made"/*.tar.gz dist/
python -m auditwheel repair --wheel-dir dist "$made"/*.whl
python release/check_wheel.py dist
