// In place of csrc/common/mma.cuh and csrc/common/shared_memory.cuh: vq_machine_on_cpu.cuh has all of them.
#pragma once

#include "lookup/intrinsics.cuh"
