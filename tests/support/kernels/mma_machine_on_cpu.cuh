// In place of csrc/mma_machine.cuh: vq_machine_on_cpu.cuh has all of it.
#pragma once

#include "vq_machine.cuh"
