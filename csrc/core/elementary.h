// log2 and 2^x in binary32, to about two units in the last place, from additions and
// multiplications only: they give the same bits on every backend, which no library's functions do.
#pragma once

#include <cstdint>

#include "argmax.h"
#include "macros.h"

namespace adaptive_spec {

// log2(1 + f) for f in [-1/4, 1/2], to a relative error of 2e-7, so that small f may be given
// exactly. f times a polynomial fitted to log2(1 + f) / f.
AS_HD float log2_near_one(float f) {
  constexpr float kTerms[] = {0x1.715476p+0f, -0x1.715496p-1f, 0x1.ec7198p-2f,
                              -0x1.713adp-2f, 0x1.271baep-2f,  -0x1.f11916p-3f,
                              0x1.bb0874p-3f, -0x1.64d24ap-3f, 0x1.3fc1d8p-4f};
  float sum = kTerms[8];
  for (int i = 7; i >= 0; --i) sum = sum * f + kTerms[i];
  return sum * f;
}

// Of a positive, normal number.
AS_HD float log2_of(float x) {
  constexpr int32_t kThreeQuarters = 0x3f400000;
  const int32_t bits = static_cast<int32_t>(bits_from_float(x));
  const int32_t exponent = (bits - kThreeQuarters) >> 23;
  // In [3/4, 3/2), so that the difference is exact.
  const float mantissa = float_from_bits(static_cast<uint32_t>(bits - exponent * (1 << 23)));
  return static_cast<float>(exponent) + log2_near_one(mantissa - 1.0f);
}

// 2^x for x up to 0; exactly 1 at 0, and 0 below -126 and for NaN.
AS_HD float exp2_of(float x) {
  constexpr float kTerms[] = {1.0f,         0x1.62e42ap-1f,  0x1.ebfd9ep-3f, 0x1.c685p-5f,
                              0x1.3d28p-7f, 0x1.461958p-10f, 0x1.c7211p-13f};
  if (!(x >= -126.0f)) return 0.0f;
  const int32_t toward_zero = static_cast<int32_t>(x);
  const int32_t whole = toward_zero - (static_cast<float>(toward_zero) > x);
  const float part = x - static_cast<float>(whole);
  float sum = kTerms[6];
  for (int i = 5; i >= 0; --i) sum = sum * part + kTerms[i];
  return sum * float_from_bits(static_cast<uint32_t>(whole + 127) << 23);
}

}  // namespace adaptive_spec
