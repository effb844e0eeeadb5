// Memory that a device writes and the host reads while the device runs.
#pragma once

#include <cstddef>

namespace adaptive_spec {

// A zero-filled block of its own, aligned to a cache line at least, freed with its owner. For a
// CUDA device it is pinned host memory mapped into the address space of every device (the context
// that wants it may change); for the CPU, plain host memory. It comes from no caching allocator:
// those may hand a block on as soon as the last tensor is gone, while a captured graph still writes
// to it.
class MappedMemory {
 public:
  // device_index: of a CUDA device, or -1 for the CPU. Throws std::runtime_error if the allocation
  // fails or the build has no CUDA code.
  MappedMemory(std::size_t num_bytes, int device_index);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  void* host() const { return host_; }
  // The same memory under the address that the device uses.
  void* device() const { return device_; }
  int device_index() const { return device_index_; }

 private:
  void* host_ = nullptr;
  void* device_ = nullptr;
  int device_index_;
};

}  // namespace adaptive_spec
