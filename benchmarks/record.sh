#!/usr/bin/env bash
# Runs one benchmark and keeps what it prints, under the machine, the versions and the command that gave it.
# Usage, from the project's root: benchmarks/record.sh NAME COMMAND...     -> benchmarks/results/NAME.txt
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
shift
out=benchmarks/results/$name.txt
mkdir -p "$(dirname "$out")"
{
  echo "date      $(date -u +%F)"
  echo "commit    $(git rev-parse --short HEAD)"
  echo "machine   $(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
  command -v nvidia-smi > /dev/null && echo "gpu       $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)"
  echo "versions  $(python3 -P -c 'import platform, kvpage; i = kvpage.build_info(); print("python", platform.python_version(), *(f"{n} {i[n]}" for n in ("torch", "triton", "transformers", "compiler", "cuda")))')"
  echo "command   $*"
  echo
} > "$out"
"$@" 2>&1 | tee -a "$out"
