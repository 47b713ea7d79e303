#!/usr/bin/env bash
# On a machine without a GPU: fills .tcache with the kernels that the GPU benchmarks launch, as the Triton of another
# machine would compile them. Then nothing is compiled there before the first figure: see docs/notes/gpu_run.md.
# Usage, with kvpage installed from this very tree: benchmarks/fill_triton_cache.sh [TRITON [PYTHON [OPTION...]]]
# TRITON and PYTHON are the other machine's versions, 3.6.0 and 3.12 by default. Options are those of
# fill_triton_cache.py, such as --capability 90. TRITON_CACHE_DIR names another folder.
# Two wheels are downloaded, of some 190 MB each. The cache is all that is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
triton=${1:-3.6.0} python=${2:-3.12}
shift $(($# < 2 ? $# : 2))
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/.tcache} PYTHONSAFEPATH=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PIP_CONSTRAINT # the other machine's Triton is no part of this environment
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

python3 -m pip install -q --no-deps --target "$place/triton" "triton==$triton"
platforms=()
for glibc in 17 24 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
  "${platforms[@]}" --platform manylinux2014_x86_64 -d "$place" "triton==$triton"
python3 -m zipfile -e "$place"/triton-*.whl "$place/other"
mkdir -p "$TRITON_CACHE_DIR"
failed=0
PYTHONPATH="$place/triton${PYTHONPATH:+:$PYTHONPATH}" python3 -m kvpage.benchmarks.fill_triton_cache \
  --library "$place/other/triton/_C/libtriton.so" "$@" || failed=1
# A launch needs the machine code and its description. The stages before it are most of the bytes.
find "$TRITON_CACHE_DIR" -type f ! -name '*.cubin' ! -name '*.json' -delete
du -sh "$TRITON_CACHE_DIR"
exit $failed
