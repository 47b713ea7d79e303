#!/usr/bin/env bash
# Test an integration against the real packages of others, in an environment made anew:
#
#     tests/integrations/run.sh NAME [arguments of pytest]        NAME is a folder here: dynamo, sglang, trl, vllm, ...
#
# The environment has the packages of $PYTHON (default: python), in which kvpage and its extra `test` are installed, and
# those of NAME/requirements.txt, without what they require in turn. It is made in a temporary folder, or in $ENV_DIR.
set -eu
cd "$(dirname "$0")/../.."
name=$1; shift
python=${PYTHON:-python}
env=${ENV_DIR:-$(mktemp -d)}/kvpage-$name
"$python" -m venv "$env"
"$python" - "$env" <<'PY'
import glob, sys, sysconfig
(site,) = glob.glob(f"{sys.argv[1]}/lib/python*/site-packages")
open(f"{site}/zz_parent.pth", "w").write(sysconfig.get_paths()["purelib"] + "\n")
PY
"$env/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r "tests/integrations/$name/requirements.txt"
PATH=$env/bin:$PATH PYTHONPATH=$PWD exec "$env/bin/python" -m pytest -n 0 -m routers "tests/integrations/$name" "$@"
