// The part of the DLPack ABI that hands a block of memory to torch, as laid down in the DLPack
// specification (https://dmlc.github.io/dlpack/latest/c_api.html) for the unversioned exchange, a
// capsule named "dltensor", which every consumer must accept. Layout and enumerator values are the
// specification's.
#pragma once

#include <cstddef>
#include <cstdint>

namespace adaptive_spec::dlpack {

// The capsule's name while nobody has taken the tensor out of it; the taker renames it.
inline constexpr const char* kCapsuleName = "dltensor";

enum DeviceType : int32_t { kCpu = 1, kCuda = 2 };
enum DataTypeCode : uint8_t { kInt = 0 };

struct Device {
  int32_t type;
  int32_t index;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t rank;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null for a contiguous tensor
  uint64_t byte_offset;
};

// Whoever holds it calls the deleter once, on any thread.
struct ManagedTensor {
  Tensor tensor;
  void* owner;
  void (*deleter)(ManagedTensor*);
};

static_assert(sizeof(DataType) == 4 && sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 64);
static_assert(offsetof(Tensor, rank) == 16 && offsetof(Tensor, shape) == 24);

}  // namespace adaptive_spec::dlpack
