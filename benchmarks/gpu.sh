#!/usr/bin/env bash
# On a machine with a CUDA device: builds, tries one case of each operation, runs all GPU benchmarks, then the
# gpu-marked tests. One call of under ten minutes, without network: torch, triton, pybind11, cmake, ninja and pytest are
# taken from the environment. A part that takes too long is interrupted as by Ctrl-C, so that it still reports.
# Peers are those of the environment, and of wheels in the folder $GPU_WHEELS (by default: wheels), which are installed
# apart, for this run alone: FlashInfer, flash-attn, FlashMLA, vLLM.
# Usage, from the project's root: benchmarks/gpu.sh [folder for the results]
# The folder holds what each part printed, its plots, and all of them in results.tar.gz.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
mkdir -p "$out"
failed=0
wheels=${GPU_WHEELS:-wheels} peers=$(mktemp -d)
seconds=${GPU_SECONDS:-540} # for all parts together
export PYTHONUNBUFFERED=1 CUDAARCHS=${CUDAARCHS:-90} KVPAGE_CUDA=ON

part() { # part NAME SECONDS COMMAND...: runs it under a time limit, keeps its output, goes on if it fails
  local name=$1 limit=$2 left=$((seconds - SECONDS))
  shift 2
  [ "$left" -ge "$limit" ] || limit=$left
  if [ "$limit" -le 0 ]; then
    echo "=== $name: no time left" | tee "$out/$name.txt"
    failed=1
    return
  fi
  echo "=== $name: $*"
  timeout -s INT -k 15 "$limit" "$@" 2>&1 | tee "$out/$name.txt"
  local code=${PIPESTATUS[0]}
  [ "$code" -eq 0 ] || { echo "=== $name failed with exit code $code" | tee -a "$out/$name.txt"; failed=1; }
}

archive() { # whatever happens: one file of all results
  find "$out" -type f ! -name results.tar.gz -printf '%P\0' | tar -C "$out" --null -T - -czf "$out/results.tar.gz"
}
trap 'archive; rm -rf "$peers"' EXIT
trap 'exit 130' INT TERM

workers=()
python3 -P -c 'import xdist' 2>/dev/null && workers=(-n 12)
tests=(pytest -q -m gpu "${workers[@]}" --maxfail=10 --tb=short)

part build 105 python3 -m pip install --no-build-isolation --no-deps .
part peers 20 python3 -P benchmarks/gpu_wheels.py "$wheels" "$peers"
export PYTHONPATH="$peers${PYTHONPATH:+:$PYTHONPATH}"
part info 15 python3 -P -c 'import json, kvpage; print(json.dumps(dict(kvpage.build_info()), default=str, indent=1))'
part machine 5 nvidia-smi
part smoke 30 pytest -q -m gpu --tb=short tests/gpu/test_smoke.py
part calibrate 15 kvpage info --calibrate
part bench_paged_attention 75 python3 -P benchmarks/bench_paged_attention.py --seconds 50 \
  --plot "$out/bench_paged_attention.png"
part bench_serving_gpu 70 python3 -P benchmarks/bench_serving_gpu.py --seconds 45 --plot "$out/bench_serving_gpu.png"
part bench_reshape_gather 35 python3 -P benchmarks/bench_reshape_gather.py --device cuda --seconds 20 \
  --plot "$out/bench_reshape_gather.png"
part bench_swap 35 python3 -P benchmarks/bench_swap.py --seconds 20 --plot "$out/bench_swap.png"
part bench_blend_ops 25 python3 -P benchmarks/bench_blend_ops.py --device cuda --seconds 10 \
  --plot "$out/bench_blend_ops.png"
part demo 20 kvpage demo --device cuda --plot "$out/demo.png"
part tests 60 "${tests[@]}" --continue-on-collection-errors --ignore tests/integrations/test_vllm_grid.py \
  --ignore tests/reliability --ignore tests/gpu/test_smoke.py
part grid 30 "${tests[@]}" tests/integrations/test_vllm_grid.py
exit $failed
