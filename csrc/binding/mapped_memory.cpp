#include "mapped_memory.h"

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#if defined(AS_CUDA)
#include <cuda_runtime.h>
#endif

namespace adaptive_spec {
namespace {

constexpr std::align_val_t kCacheLine{64};

#if defined(AS_CUDA)

void check(cudaError_t error, const std::string& attempt) {
  if (error == cudaSuccess) return;
  // The runtime keeps the error until it is asked for; the next launch must not find it.
  cudaGetLastError();
  throw std::runtime_error("DecisionRing: " + attempt + ": " + cudaGetErrorString(error));
}

// Makes a device current and, at the end, the one that was before.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_index) {
    check(cudaGetDevice(&previous_), "asking CUDA for the current device");
    if (previous_ == device_index) return;
    check(cudaSetDevice(device_index), "making cuda:" + std::to_string(device_index) + " current");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) static_cast<void>(cudaSetDevice(previous_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
  bool changed_ = false;
};

#endif

}  // namespace

MappedMemory::MappedMemory(std::size_t num_bytes, int device_index) : device_index_(device_index) {
  if (device_index < 0) {
    host_ = device_ = ::operator new(num_bytes, kCacheLine);
    std::memset(host_, 0, num_bytes);
    return;
  }
#if defined(AS_CUDA)
  const DeviceGuard guard(device_index);
  check(cudaHostAlloc(&host_, num_bytes, cudaHostAllocMapped | cudaHostAllocPortable),
        "allocating " + std::to_string(num_bytes) + " bytes of pinned, mapped memory");
  std::memset(host_, 0, num_bytes);
  const cudaError_t error = cudaHostGetDevicePointer(&device_, host_, 0);
  if (error != cudaSuccess) {
    static_cast<void>(cudaFreeHost(host_));
    check(error, "mapping the ring into the address space of cuda:" + std::to_string(device_index));
  }
#else
  throw std::runtime_error(
      "DecisionRing: this build has no CUDA code, so it cannot make a ring on cuda:" +
      std::to_string(device_index) + "; build it where nvcc is found (ADAPTIVE_SPEC_CUDA=1)");
#endif
}

MappedMemory::~MappedMemory() {
  if (device_index_ < 0) {
    ::operator delete(host_, kCacheLine);
    return;
  }
#if defined(AS_CUDA)
  // Waits for rounds that were launched and then dropped. At the end of the process the driver may
  // be gone before the last owner is (cudaErrorCudartUnloading), and with it the memory: there is
  // nothing to be done about any error here, nor may the next launch be blamed for it.
  int previous = -1;
  const bool restore = cudaGetDevice(&previous) == cudaSuccess && previous != device_index_;
  if (restore) static_cast<void>(cudaSetDevice(device_index_));
  static_cast<void>(cudaDeviceSynchronize());
  static_cast<void>(cudaFreeHost(host_));
  if (restore) static_cast<void>(cudaSetDevice(previous));
  static_cast<void>(cudaGetLastError());
#endif
}

}  // namespace adaptive_spec
