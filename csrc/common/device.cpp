// Device attributes, and the part of a launch that is the same for all kernels.
#include "common/launch.h"

namespace localq {

namespace {

int attribute(cudaDeviceAttr which, int device, const char* op) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), op);
  return value;
}

}  // namespace

const DeviceFacts& device_facts(int device, const char* op) {
  static DeviceFacts known[kMostDevices] = {};  // a race is harmless: all writers store the same values
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

void launch_any(const char* op, int device, const LaunchWishes& wishes, const void* kernel, dim3 grid, dim3 block,
                size_t shared_bytes, cudaStream_t stream, void** arguments) {
  const DeviceFacts& about = device_facts(device, op);
  if (shared_bytes > 48 * 1024) {
    // The maximum of the device, not the size of this launch: a graph may hold other launches of the same kernel.
    cudaFuncAttributes facts;
    check_cuda(cudaFuncGetAttributes(&facts, kernel), op);
    const int most = about.shared_bytes_per_block - int(facts.sharedSizeBytes);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), op);
  }
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (about.dependent_launch && !wishes.begins_step) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (wishes.most_l1) {
    const int own = about.system_bytes_per_block, most = about.shared_bytes_per_block + own;
    const int percent = ((int(shared_bytes) + own) * 100 + most - 1) / most;
    attributes[config.numAttrs].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[config.numAttrs++].val.sharedMemCarveout = percent;
  }
  if (wishes.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = unsigned(wishes.cluster);
    attributes[config.numAttrs].val.clusterDim.y = attributes[config.numAttrs].val.clusterDim.z = 1;
    ++config.numAttrs;
  }
  check_cuda(cudaLaunchKernelExC(&config, kernel, arguments), op);
}

}  // namespace localq
