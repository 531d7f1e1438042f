#!/usr/bin/env bash
# What a GPU must show: build, tests, sanitizer, speeds, counters. A short table last.
# Usage: bash tests/tools/gpu_report.sh [OUTPUT_FOLDER [STEP...]]     all steps but the sanitizer's and ncu without a STEP
# Steps: see `case` below. Needs nvcc, torch with CUDA and the test packages; `smollm2`, `quality`, `vq2`, `two_bits`,
# `bcq_quality` and some tests also the embedded model. MODEL=NAME changes what `model` and `profile` measure,
# LIMIT=SECONDS (600) is for each step, CASES="vq_gemv hadamard -self-test" narrows what the sanitizer runs. One step at
# a time on one GPU: several at once slow each other down by more than their number.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-gpu_report}
shift || true
mkdir -p "$out"
declare -A result
small="cuda and not slow"
limit="timeout -k 5 ${LIMIT:-600}"
sanitizer() { # tool, arguments... : over every kernel and its edge shapes
  $limit compute-sanitizer --tool "$1" "${@:2}" --error-exitcode 9 \
    python3 -m tests.tools.every_kernel ${CASES:-}
}

step() { # name, lines to show, command...
  local name=$1 lines=$2 start=$SECONDS
  shift 2
  "$@" >"$out/$name.log" 2>&1
  result[$name]="exit $? after $((SECONDS - start)) s"
  echo "== $name: ${result[$name]}"
  tail -n "$lines" "$out/$name.log"
}

mixtures() { # inside the memory of the cards that people run them on
  local failed=0
  $limit python3 -m localq bench --synthetic gpt-oss-20b --vram 16 --no-baseline -p 0 -r 3 -o md || failed=$?
  $limit python3 -m localq bench --synthetic qwen3-30b-a3b@nf4 --vram 24 --no-baseline -p 0 -r 3 -o md || failed=$?
  return $failed
}

bcq_quality() { # a conversion waits for launches, so four share the list of them; what is done stays in the folder
  local each
  for each in 1 2 3 4; do $limit python3 -m tests.tools.bcq_table "$out/bcq" & done
  wait
}

run() {
  case $1 in
    build) step build 4 python3 -m pip install --quiet --no-build-isolation --no-deps --editable . ;;
    doctor) step doctor 20 $limit python3 -m localq doctor ;;
    tests) step tests 30 $limit python3 -m pytest -q -s -m cuda tests -p no:cacheprovider --timeout 500 ;;
    kernel_tests) step kernel_tests 30 $limit python3 -m pytest -q -m "$small" tests/kernels tests/formats -p no:cacheprovider --timeout 500 ;;
    selftest) step selftest 10 $limit python3 -m pytest -q -m cuda tests/engine/test_selftest.py -p no:cacheprovider ;;
    memcheck) step memcheck 4 sanitizer memcheck --kernel-name kns=localq ;;
    racecheck) step racecheck 4 sanitizer racecheck --racecheck-report all --kernel-name kns=localq ;; # not torch's
    initcheck) step initcheck 4 sanitizer initcheck ;;
    synccheck) step synccheck 4 sanitizer synccheck --kernel-name kns=localq ;;
    kernels) step kernels 140 $limit python3 -m localq bench --kernels ;;
    crossover) step crossover 60 $limit python3 -m localq bench --crossover ;;
    patched) step patched 40 $limit python3 -m localq bench --patched ;;
    quantize) step quantize 24 $limit python3 -m localq bench --quantize llama-3.3-70b --vram 24GB ;;
    model) step model 12 $limit python3 -m localq bench --synthetic "${MODEL:-llama-3.1-8b@nf4}" -p 2048 --against none ;;
    large) step large 12 $limit python3 -m localq bench --synthetic llama-3.3-70b@nf4 -p 0 --against none ;;
    profile) step profile 20 $limit python3 -m localq bench --synthetic "${MODEL:-llama-3.1-8b@nf4}" --profile ;;
    smollm2) step smollm2 10 $limit python3 -m localq bench smollm2-135m@nf4 --device cuda ;;
    vq2) step vq2 20 $limit bash tests/tools/vq2_report.sh "$out/vq2" ;;
    faults) step faults 30 $limit python3 -m pytest -q -m cuda tests/worker/test_faults_on_cuda.py -p no:cacheprovider ;;
    planner) step planner 30 $limit python3 -m tests.tools.planner_report ;;
    instruments) step instruments 20 $limit python3 -m tests.tools.tui_report "$out/instruments" ;;
    bcq) step bcq 30 $limit bash tests/tools/bcq_report.sh ;;
    formats) step formats 30 $limit python3 -m localq bench --formats "${MODEL:-llama-3.1-8b}" --synthetic -o md ;;
    formats_32b) step formats_32b 30 $limit python3 -m localq bench --formats qwen3-32b --synthetic -o md ;;
    mixtures) step mixtures 30 mixtures ;;
    bcq_quality) step bcq_quality 60 bcq_quality ;;
    two_bits) step two_bits 30 $limit python3 -m tests.tools.two_bits_table "$out/two_bits" ;;
    quality) step quality 10 $limit python3 -m localq eval smollm2-135m@nf4 --device cuda --against reference --decode 512 ;;
    decode_memcheck) step decode_memcheck 2 $limit compute-sanitizer --tool memcheck --error-exitcode 9 \
      python3 -m localq run smollm2-135m@nf4 --device cuda "Hello" ;;
    ncu) step ncu 60 $limit bash tests/tools/ncu_counts.sh ;;
    *) echo "no such step: $1" >&2 && exit 2 ;;
  esac
}

[ $# -gt 0 ] || set -- build doctor tests memcheck kernels profile model smollm2 decode_memcheck
for name in "$@"; do run "$name"; done
echo "== summary"
for name in "$@"; do echo "$name: ${result[$name]}"; done
