#!/usr/bin/env bash
# Everything that a GPU must show, in one command: build, `pytest -m cuda`, the sanitizer, speeds. A short table last.
# Usage: bash tests/gpu_report.sh [OUTPUT_FOLDER] [MODEL.gguf]   (needs nvcc, torch with CUDA and the test packages)
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_report}
model=${2:-smollm2-135m}
mkdir -p "$out"
declare -A result

step() { # name, command...
  local name=$1 start=$SECONDS
  shift
  "$@" >"$out/$name.log" 2>&1
  result[$name]="exit $? after $((SECONDS - start)) s"
  echo "== $name: ${result[$name]}"
  tail -n "${TAIL:-4}" "$out/$name.log"
}

step build python3 -m pip install --quiet --no-build-isolation --no-deps --editable .
step doctor python3 -m localq doctor
TAIL=25 step tests python3 -m pytest -q -m cuda tests -p no:cacheprovider -x --timeout 500
if command -v compute-sanitizer >/dev/null; then
  step memcheck compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q -m "cuda and not slow" tests/kernels \
    -p no:cacheprovider
else
  echo "== memcheck: not run, no compute-sanitizer here"
fi
TAIL=30 step kernels python3 -m localq bench --kernels
TAIL=8 step decode python3 -m localq bench "$model@nf4" --device cuda
echo "== summary"
for name in "${!result[@]}"; do echo "$name: ${result[$name]}"; done
