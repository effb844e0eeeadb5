// Tensors as the walks see them: a pointer and strides in elements. Offsets are int64 throughout; a
// row of logits times a vocabulary passes 2^31 in ordinary use.
#pragma once

#include <cstdint>

#include "macros.h"

namespace adaptive_spec {

// A 1-D tensor, or an optional one that was not given (data null).
template <typename T>
struct Vector {
  T* data = nullptr;
  int64_t stride = 1;

  AS_HD T& operator[](int64_t i) const { return data[i * stride]; }
  AS_HD explicit operator bool() const { return data != nullptr; }
};

// A 2-D tensor. Its rows may be wider than what is used of them, and further apart than they are
// wide.
template <typename T>
struct Matrix {
  T* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 1;

  AS_HD T& at(int64_t row, int64_t col) const { return data[row * row_stride + col * col_stride]; }
  AS_HD Vector<T> row(int64_t row) const { return {data + row * row_stride, col_stride}; }
};

}  // namespace adaptive_spec
