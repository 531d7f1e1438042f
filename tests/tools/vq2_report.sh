#!/usr/bin/env bash
# Two bits of the embedded model: made in every way, timed, and judged on the validation slice.
# Usage: bash tests/tools/vq2_report.sh FOLDER [--device cpu]       a line for each way: name, seconds, what `eval --json` prints
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=$1
shift
device=${*:---device cuda}
mkdir -p "$folder"

made() { # name, options of quantize...
  local name=$1 start=$SECONDS
  shift
  # shellcheck disable=SC2086 # two words
  python3 -m localq quantize smollm2-135m --out "$folder/$name" --quiet $device "$@" || return
  local seconds=$((SECONDS - start))
  # shellcheck disable=SC2086
  echo "$name: $seconds s: $(python3 -m localq eval "$folder/$name" $device --json)"
}

# shellcheck disable=SC2086
echo "reference: $(python3 -m localq eval smollm2-135m $device --json)"
made quick --format vq2 --quick
made quick-all-text --format vq2 --quick --windows 110
made quick-2.3-bits --format vq2 --quick --bits 2.3
made best --format vq2 --best
made best-3-bits --format vq2 --best --bits 3
made aqlm2x8 --format aqlm2x8 --quick
