#!/usr/bin/env bash
# Counts instructions, shared-memory wavefronts and bytes of the hot kernels with Nsight Compute; prints them per weight.
# Usage: bash tests/tools/ncu_counts.sh [NAME...]   only cases whose name holds one of NAME, such as nf4_gemv attention
# STALLS=1 before it: instead what warps wait for, how busy each unit and memory are, as ncu tells it.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -n "${STALLS:-}" ]; then
  exec ncu --clock-control none --cache-control all --profile-from-start off --kernel-name-base demangled \
    --kernel-name regex:localq --section SpeedOfLight --section WarpStateStats --section SchedulerStats \
    --section MemoryWorkloadAnalysis --section Occupancy --section LaunchStats --page details \
    python3 -m tests.tools.ncu_counts launch "$@"
fi
counts=$(mktemp)
trap 'rm -f "$counts"' EXIT
metrics=$(python3 -c 'from tests.tools import ncu_counts as n; print(",".join(n.METRICS))')
ncu --clock-control none --cache-control all --profile-from-start off --csv --print-units base --metrics "$metrics" \
  python3 -m tests.tools.ncu_counts launch "$@" >"$counts"
python3 -m tests.tools.ncu_counts table "$counts" "$@" || { tail -n 20 "$counts" && exit 1; }
