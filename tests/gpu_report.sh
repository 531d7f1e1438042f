#!/usr/bin/env bash
# Everything that a GPU must show, in one command: build, `pytest -m cuda`, the sanitizer, speeds. A short table last.
# Usage: bash tests/gpu_report.sh [OUTPUT_FOLDER]   (needs nvcc, torch with CUDA and the test packages)
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_report}
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
TAIL=30 step tests python3 -m pytest -q -s -m cuda tests -p no:cacheprovider --timeout 500
step memcheck compute-sanitizer --tool memcheck --error-exitcode 9 \
  python3 -m pytest -q -m "cuda and not slow" tests/kernels -p no:cacheprovider
TAIL=30 step kernels python3 -m localq bench --kernels
TAIL=6 step decode_nf4 python3 -m localq bench smollm2-135m@nf4 --device cuda
TAIL=6 step decode_bf16 python3 -m localq bench smollm2-135m --device cuda
TAIL=2 step decode_memcheck compute-sanitizer --tool memcheck --error-exitcode 9 \
  python3 -m localq bench smollm2-135m@nf4 --device cuda -n 8 -r 1
echo "== summary"
for name in "${!result[@]}"; do echo "$name: ${result[$name]}"; done
