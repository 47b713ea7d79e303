#!/usr/bin/env bash
# On a machine with a CUDA device: builds kvpage, tries one case of each operation, runs all GPU benchmarks, then the
# gpu-marked tests. One call of under ten minutes, without network: torch, triton, pybind11, cmake, ninja and pytest are
# taken from the environment. benchmarks/gpu/plan.py has the parts, benchmarks/gpu/summary.py what they should reach.
# Usage: benchmarks/gpu.sh [--dry-run] [--seconds N] [--wheels FOLDER] [FOLDER]
# FOLDER gets results.tar.gz and nothing else. It is written anew after each part.
cd "$(dirname "$0")/.." || exit
exec python3 -m benchmarks.gpu "$@"
