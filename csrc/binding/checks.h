// Argument checks. Every op runs all of its checks before anything is written; a failed one throws
// std::invalid_argument, which torch hands to Python as a ValueError that says which argument, what
// was expected and what came.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "strided.h"

namespace adaptive_spec {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

[[noreturn]] void fail(const char* op, const std::string& what);
[[noreturn]] void fail_argument(const char* op, const char* name, const std::string& expected,
                                const std::string& got);

// What a dimension may be; implicitly an exact size.
struct Dim {
  int64_t size;
  bool at_least = false;

  Dim(int64_t size) : size(size) {}
  bool accepts(int64_t n) const { return at_least ? n >= size : n == size; }
};

inline Dim at_least(int64_t size) {
  Dim dim(size);
  dim.at_least = true;
  return dim;
}

// torch's code of an element type; libtorch numbers types, so it has to be asked.
template <typename T>
int32_t dtype_code();
template <>
inline int32_t dtype_code<int32_t>() {
  return aoti_torch_dtype_int32();
}
template <>
inline int32_t dtype_code<int64_t>() {
  return aoti_torch_dtype_int64();
}
template <>
inline int32_t dtype_code<float>() {
  return aoti_torch_dtype_float32();
}
template <>
inline int32_t dtype_code<bool>() {
  return aoti_torch_dtype_bool();
}

int32_t dtype_of(const Tensor& tensor);
std::string dtype_name(int32_t code);

// Tensors of one op call, turned into what the core reads and writes.
class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  const char* op() const { return op_; }

  void same_device(const char* name, const Tensor& tensor, const Tensor& first) const;
  void rank(const char* name, const Tensor& tensor, int64_t expected) const;
  void shape(const char* name, const Tensor& tensor, std::initializer_list<Dim> expected) const;
  int64_t integer(const char* name, int64_t value, int64_t lowest, int64_t highest) const;

  template <typename T>
  void dtype(const char* name, const Tensor& tensor) const {
    if (dtype_of(tensor) != dtype_code<T>()) fail_dtype(name, tensor, dtype_code<T>());
  }

  // For a const T the tensor is read only.
  template <typename T>
  Vector<T> vector(const char* name, const Tensor& tensor, Dim size) const {
    dtype<std::remove_const_t<T>>(name, tensor);
    shape(name, tensor, {size});
    return {data<T>(tensor), tensor.stride(0)};
  }
  template <typename T>
  Vector<T> vector(const char* name, const OptionalTensor& tensor, Dim size) const {
    return tensor ? vector<T>(name, *tensor, size) : Vector<T>{};
  }
  template <typename T>
  Matrix<T> matrix(const char* name, const Tensor& tensor, Dim rows, Dim cols) const {
    dtype<std::remove_const_t<T>>(name, tensor);
    shape(name, tensor, {rows, cols});
    // An empty tensor has no memory to offset into.
    if (tensor.numel() == 0) return {};
    return {data<T>(tensor), tensor.stride(0), tensor.stride(1)};
  }

 private:
  [[noreturn]] void fail_dtype(const char* name, const Tensor& tensor, int32_t expected) const;

  template <typename T>
  static T* data(const Tensor& tensor) {
    if constexpr (std::is_const_v<T>) {
      return static_cast<T*>(tensor.const_data_ptr());
    } else {
      return static_cast<T*>(tensor.mutable_data_ptr());
    }
  }

  const char* op_;
};

}  // namespace adaptive_spec
