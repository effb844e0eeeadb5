// The greedy token of a row of logits: the largest entry, the lowest index among equals, NaN left
// out. Partial results merge in any order to the same answer, so how a row is split over lanes or
// blocks never shows.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "macros.h"

namespace adaptive_spec {

// 16-bit floats as they lie in memory, so that the core needs neither torch nor CUDA headers.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

AS_HD float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

AS_HD uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The entry as a number that the machine compares.
AS_HD double comparable(double x) { return x; }
AS_HD float comparable(float x) { return x; }
AS_HD float comparable(BFloat16 x) { return float_from_bits(static_cast<uint32_t>(x.bits) << 16); }
AS_HD float comparable(Half x) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#else
  // Written without branches: compilers then vectorise it.
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const int32_t magnitude = x.bits & 0x7fff;
  const uint32_t shifted = static_cast<uint32_t>(magnitude) << 13;
  // Subnormals by integer conversion, so that a flush-to-zero mode cannot make them all equal.
  const uint32_t subnormal = bits_from_float(static_cast<float>(magnitude) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x0400 ? subnormal : shifted + (112u << 23);
  const uint32_t bits = magnitude < 0x7c00 ? finite : shifted | 0x7f800000u;
  return float_from_bits(sign | bits);
#endif
}

template <typename T>
struct Argmax {
  T value = -static_cast<T>(INFINITY);
  int64_t index = 0;
  bool has_nan = false;

  // For indices taken in ascending order.
  AS_HD void take(T x, int64_t i) {
    has_nan |= x != x;
    if (x > value) {
      value = x;
      index = i;
    }
  }
  // `n` entries from index `first` on, in ascending order as above. Their maximum is found first;
  // only a run that beats all before it, which soon becomes rare, is searched for the place.
  template <int n>
  AS_HD void take_run(const T (&run)[n], int64_t first) {
    T top = value;
    for (int k = 0; k < n; ++k) {
      has_nan |= run[k] != run[k];
      top = run[k] > top ? run[k] : top;
    }
    if (!(top > value)) return;
    value = top;
    for (int k = n - 1; k >= 0; --k) {
      if (run[k] == top) index = first + k;
    }
  }
  // False for a row of nothing but NaN and -inf: no token of it is any better than another.
  AS_HD bool is_usable() const { return value > -static_cast<T>(INFINITY); }
};

struct MergeArgmax {
  template <typename T>
  AS_HD Argmax<T> operator()(Argmax<T> a, const Argmax<T>& b) const {
    if (b.value > a.value || (b.value == a.value && b.index < a.index)) {
      a.value = b.value;
      a.index = b.index;
    }
    a.has_nan |= b.has_nan;
    return a;
  }
};

}  // namespace adaptive_spec
