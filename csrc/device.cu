// Facts about the device that launchers need.
#include "check.h"

namespace localq {

int multiprocessors(int device, const char* op) {
  constexpr int kDevices = 64;
  static int known[kDevices] = {};  // written at most twice with the same value, so a race is harmless
  require(device >= 0 && device < kDevices, op, "device", device, "must be from 0 to 63");
  if (known[device] == 0) {
    int count = 0;
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), op);
    known[device] = count;
  }
  return known[device];
}

}  // namespace localq
