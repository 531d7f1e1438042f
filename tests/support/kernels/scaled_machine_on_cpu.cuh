// In place of csrc/scaled/intrinsics.cuh, behind vq_machine_on_cpu.cuh.
#pragma once

#include "common/async_copies.cuh"

namespace localq::scaled {

inline void copy_async_4(uint8_t* to, const uint8_t* from) {
  on_cpu::copy_later(to, from, 4);
}

}  // namespace localq::scaled
