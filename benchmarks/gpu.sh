#!/usr/bin/env bash
# On a machine with a CUDA device: builds, runs the gpu-marked tests and all GPU benchmarks, in one call of under ten
# minutes and without network (torch, triton, pybind11, cmake, ninja and pytest are taken from the environment).
# Usage, from the project's root: benchmarks/gpu.sh [folder for the results]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
mkdir -p "$out"
failed=0
export PYTHONUNBUFFERED=1 CUDAARCHS=${CUDAARCHS:-90} KVPAGE_CUDA=ON

part() { # part NAME SECONDS COMMAND...: runs it under a time limit, keeps its output, goes on if it fails
  local name=$1 limit=$2
  shift 2
  echo "=== $name: $*"
  timeout "$limit" "$@" 2>&1 | tee "$out/$name.txt"
  local code=${PIPESTATUS[0]}
  [ "$code" -eq 0 ] || { echo "=== $name failed with exit code $code"; failed=1; }
}

part build 120 python3 -m pip install --no-build-isolation --no-deps .
part info 20 python3 -P -c 'import json, kvpage; print(json.dumps(dict(kvpage.build_info()), default=str, indent=1))'
part calibrate 20 kvpage info --calibrate
part machine 10 nvidia-smi
part tests 120 pytest -q -m gpu --continue-on-collection-errors --ignore tests/integrations/test_vllm_grid.py --ignore tests/reliability
part grid 90 pytest -q -m gpu tests/integrations/test_vllm_grid.py
part bench_swap 60 python3 -P benchmarks/bench_swap.py --plot "$out/bench_swap.png"
part bench_reshape_gather 60 python3 -P benchmarks/bench_reshape_gather.py --device cuda \
  --plot "$out/bench_reshape_gather.png"
part bench_blend_ops 40 python3 -P benchmarks/bench_blend_ops.py --device cuda --plot "$out/bench_blend_ops.png"
part bench_paged_attention 60 python3 -P benchmarks/bench_paged_attention.py --plot "$out/bench_paged_attention.png"
part demo 40 kvpage demo --device cuda --plot "$out/demo.png"
exit $failed
