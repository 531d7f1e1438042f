#!/usr/bin/env bash
# Counts instructions, shared-memory wavefronts and bytes of the hot kernels with Nsight Compute; prints them per weight.
# Usage: bash tests/ncu_counts.sh [NAME...]   only cases whose name holds one of NAME, such as nf4_gemv attention
set -euo pipefail
cd "$(dirname "$0")/.."
counts=$(mktemp)
trap 'rm -f "$counts"' EXIT
metrics=$(python3 -c 'import sys; sys.path.insert(0, "tests/support"); import ncu_counts as n; print(",".join(n.METRICS))')
ncu --clock-control none --cache-control all --profile-from-start off --csv --print-units base --metrics "$metrics" \
  python3 tests/support/ncu_counts.py launch "$@" >"$counts"
python3 tests/support/ncu_counts.py table "$counts" "$@" || { tail -n 20 "$counts" && exit 1; }
