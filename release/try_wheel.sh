#!/usr/bin/env bash
# Install a wheel beside each of some releases of torch, in virtual environments of their own, and use it.
#   release/try_wheel.sh dist/kvpage-0.1.0-*.whl 2.6 2.15
# VENVS=FOLDER keeps the environments there and takes those that are there: torch is a large download.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 WHEEL TORCH_RELEASE..." >&2; exit 2; }
wheel=$(realpath "$1") script=$(realpath "$(dirname "$0")/use_installed.py")
shift
if [ -z "${VENVS:-}" ]; then VENVS=$(mktemp -d); trap 'rm -rf "$VENVS"' EXIT; fi
VENVS=$(realpath "$VENVS")
unset PYTHONPATH
for release in "$@"; do
  venv=$VENVS/torch-$release
  if [ ! -d "$venv" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q "torch==$release.*" numpy
  fi
  "$venv/bin/pip" install -q --no-deps --force-reinstall "$wheel"
  (cd "$venv" && bin/python "$script")
done
