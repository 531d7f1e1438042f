// Facts about the device that launchers need.
#include "launch.h"

namespace localq {

namespace {

int attribute(cudaDeviceAttr which, int device, const char* op) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), op);
  return value;
}

}  // namespace

const DeviceFacts& device_facts(int device, const char* op) {
  static DeviceFacts known[kMostDevices] = {};  // written at most twice with the same values, so a race is harmless
  require(device >= 0 && device < kMostDevices, op, "device", device, "must be from 0 to 63");
  if (known[device].multiprocessors == 0) {
    known[device].shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device, op);
    known[device].dependent_launch = attribute(cudaDevAttrComputeCapabilityMajor, device, op) >= 9;
    known[device].clusters = attribute(cudaDevAttrClusterLaunch, device, op) != 0;
    known[device].system_bytes_per_block = attribute(cudaDevAttrReservedSharedMemoryPerBlock, device, op);
    known[device].multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device, op);
  }
  return known[device];
}

int multiprocessors(int device, const char* op) {
  return device_facts(device, op).multiprocessors;
}

}  // namespace localq
