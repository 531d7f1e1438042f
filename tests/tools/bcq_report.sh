#!/usr/bin/env bash
# Binary codes on a GPU: kernels against fp64 and bit for bit, those that they share code with, then time and size by
# planes and groups. Quality against size, which takes longer: python tests/bcq_table.py FOLDER
# Usage: bash tests/bcq_report.sh [SHAPES]
set -uo pipefail
cd "$(dirname "$0")/.."
failed=0
python3 -m pytest -q -m cuda tests/kernels/test_bcq_gemv.py tests/kernels/test_vq_gemv.py || failed=1
python3 tests/support/every_kernel.py bcq_ || failed=1 # edge shapes; under compute-sanitizer: the same command
python3 -m localq bench --bcq "${1:-4096x4096,7168x7168,12288x12288}" || failed=1
python3 - << 'END' || failed=1
import sys
from localq.bench import kernels

sys.exit(bool(kernels.run(sys.stdout, "12288x12288,28672x8192,8192x28672,8192x8192", ["bcq", "vq"])["failures"]))
END
exit $failed
