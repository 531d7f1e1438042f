// In place of csrc/common/mma.cuh: vq_machine_on_cpu.cuh has all of it.
#pragma once

#include "lookup/intrinsics.cuh"
