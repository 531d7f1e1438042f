// What can go wrong on a GPU, on demand: for tests of what happens after. Built by `gpu_faults.py`, never shipped.
#include <cuda_runtime.h>

namespace {

__global__ void store_badly(int* nowhere) {
  *nowhere = 1;
}

__global__ void spin(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

}  // namespace

// An illegal access: whatever the process asks of CUDA from then on fails.
extern "C" int bad_store(void* stream) {
  store_badly<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(reinterpret_cast<int*>(16));
  return cudaGetLastError();
}

// A kernel that takes a minute, far longer than any watchdog waits: nothing behind it on `stream` begins. It does end,
// so that a process that cannot be ended leaves no card behind that is busy for ever.
extern "C" int hang(void* stream) {
  spin<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(60'000'000'000ull);
  return cudaGetLastError();
}
