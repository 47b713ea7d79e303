#!/usr/bin/env bash
# Test integrations against the real packages of others, each in an environment made anew:
#
#     tests/integrations/run.sh NAME [arguments of pytest]     NAME is a folder here: dynamo, sglang, trl, vllm, ...
#     tests/integrations/run.sh all                            each in turn; one that cannot be installed is skipped
#
# An environment has the packages of $PYTHON (default: python), in which kvpage and its extra `test` are installed, and
# those of NAME/requirements.txt, without what they require in turn; PIP_CONSTRAINT does not hold for them. It is made in
# a temporary folder, or in $ENV_DIR.
# vllm_over has the packages and tests of vllm, and the Python of a later vLLM: see vllm/over.py.
# nano_vllm and mini_sglang have no packages: NANO_VLLM and MINI_SGLANG name the folders with theirs.
#
# A run of all tests of a folder writes its row of docs/integrations.md anew: versions, results, commit.
set -u
VLLM_OVER=${VLLM_OVER:-0.33.0}
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
folder=${ENV_DIR:-$(mktemp -d)}

skip() { # NAME REASON
  echo "$1: not run: $2" >&2
  "$python" tests/integrations/rows.py "$1" --reason "$2"
}

make_env() { # NAME: prints the environment's python; fails where a package cannot be installed
  env=$folder/kvpage-$1
  "$python" -m venv "$env" && "$python" - "$env" <<'PY' &&
import glob, sys, sysconfig
(site,) = glob.glob(f"{sys.argv[1]}/lib/python*/site-packages")
open(f"{site}/zz_parent.pth", "w").write(sysconfig.get_paths()["purelib"] + "\n")
PY
    PIP_CONSTRAINT='' "$env/bin/python" -m pip install -q --disable-pip-version-check --no-deps \
      -r "tests/integrations/${1%_over}/requirements.txt" >&2 && echo "$env/bin/python"
}

run() { # NAME [arguments of pytest]
  name=$1 device= tests=(-m routers "tests/integrations/${1%_over}"); shift
  case $name in
    nano_vllm | mini_sglang)
      sources=$(echo "$name" | tr '[:lower:]' '[:upper:]') tests=(-k itself "tests/house/test_${name}_example.py")
      [ -n "${!sources:-}" ] || { skip "$name" "$sources names no folder"; return 0; }
      own=$python ;;
    *) own=$(make_env "$name") || { skip "$name" "its packages could not be installed"; return 1; } ;;&
    vllm_over)
      device=cpu
      "$own" tests/integrations/vllm/over.py "$VLLM_OVER" || { skip "$name" "there is no such wheel"; return 1; } ;;
  esac
  PATH=$(dirname "$(command -v "$own")"):$PATH PYTHONPATH=$PWD ${device:+env VLLM_TARGET_DEVICE=$device} \
    "$own" -m pytest -n 0 "${tests[@]}" --junit-xml "$folder/$name.xml" "$@"
  result=$?
  [ $# -gt 0 ] || "$own" tests/integrations/rows.py "$name" --results "$folder/$name.xml"
  return $result
}

[ "$1" = all ] || { run "$@"; exit; }
failed=0
for each in tests/integrations/*/requirements.txt; do
  run "$(basename "$(dirname "$each")")" || failed=1
done
for each in vllm_over mini_sglang nano_vllm; do run "$each" || failed=1; done
exit $failed
