#!/usr/bin/env bash
# Binary codes on a GPU: kernels against fp64 and bit for bit, those that they share code with, then time and size by
# planes and groups. Quality against size, which takes longer: python -m tests.tools.bcq_table FOLDER
# Usage: bash tests/tools/bcq_report.sh [SHAPES]
set -uo pipefail
cd "$(dirname "$0")/../.."
failed=0
python3 -m pytest -q -m cuda tests/formats/bcq/test_kernel.py tests/formats/codebooks/test_lookup_kernel.py || failed=1
python3 -m tests.tools.every_kernel bcq_ || failed=1 # edge shapes; under compute-sanitizer: the same command
python3 -m localq bench --bcq "${1:-4096x4096,7168x7168,12288x12288}" || failed=1
python3 - << 'END' || failed=1
import sys
from localq.bench import kernels

sys.exit(bool(kernels.run(sys.stdout, "12288x12288,28672x8192,8192x28672,8192x8192", ["bcq", "vq"])["failures"]))
END
exit $failed
