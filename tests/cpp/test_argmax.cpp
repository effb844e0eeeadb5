// argmax: 16-bit conversions over all values, ties, NaN, and the same answer however a row is
// split.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "argmax.h"
#include "argmax_row.h"
#include "check.h"

using namespace adaptive_spec;

namespace {

// By the definition of IEEE binary formats, in double.
double decode(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  double value;
  if (exponent == (1 << exponent_bits) - 1) {
    value = mantissa == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return bits & 0x8000 ? -value : value;
}

void same(float got, double expected) {
  CHECK(std::isnan(got) == std::isnan(expected));
  if (!std::isnan(expected)) CHECK(static_cast<double>(got) == expected);
}

void test_conversions() {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    same(comparable(Half{static_cast<uint16_t>(bits)}), decode(bits, 5, 10));
    same(comparable(BFloat16{static_cast<uint16_t>(bits)}), decode(bits, 8, 7));
  }
}

Argmax<float> argmax(const std::vector<float>& row) {
  Argmax<float> best;
  for (size_t i = 0; i < row.size(); ++i) best.take(row[i], static_cast<int64_t>(i));
  return best;
}

void test_ties_nan_and_hopeless_rows() {
  const float inf = INFINITY;
  const float nan = NAN;
  const auto run = [](const std::vector<float>& row) { return argmax(row); };
  CHECK(run({1, 3, 3, 2}).index == 1);
  CHECK(run({-0.0f, 0.0f}).index == 0);
  CHECK(run({0.0f, -0.0f}).index == 0);
  CHECK(run({inf, inf}).index == 0);
  CHECK(run({nan, 1, nan, 2}).index == 3 && run({nan, 1}).has_nan && run({nan, 1}).is_usable());
  CHECK(!run({1, 2}).has_nan);
  CHECK(run({nan, nan}).index == 0 && !run({nan, nan}).is_usable());
  CHECK(run({-inf, -inf}).index == 0 && !run({-inf, -inf}).is_usable());
  CHECK(run({-inf, -std::numeric_limits<float>::max()}).index == 1);
}

template <typename T>
void expect_same(const Argmax<T>& a, const Argmax<T>& b) {
  CHECK(a.index == b.index && a.value == b.value && a.has_nan == b.has_nan);
}

// Rows with many equal maxima, NaN and -inf, cut into pieces that are merged in random order.
void test_any_split_and_the_blocked_scan_agree() {
  std::mt19937 random(7);
  for (int trial = 0; trial < 400; ++trial) {
    const int64_t size = 1 + random() % (trial % 4 == 0 ? 5000 : 40);
    std::vector<float> row(size);
    const float values[] = {-INFINITY, -1.0f, -0.0f, 0.0f, 2.0f, NAN};
    const int num_values = trial % 5 == 0 ? 1 : 6;
    for (float& x : row) x = values[random() % num_values];
    const auto whole = argmax(row);
    expect_same(whole, cpu::argmax_row(row.data(), size));

    Argmax<float> by_runs;
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
      float run[8];
      std::copy_n(row.begin() + i, 8, run);
      by_runs.take_run(run, i);
    }
    for (; i < size; ++i) by_runs.take(row[i], i);
    expect_same(whole, by_runs);

    std::vector<Argmax<float>> parts(1 + random() % 9);
    for (int64_t i = 0; i < size; ++i) parts[i % parts.size()].take(row[i], i);
    std::shuffle(parts.begin(), parts.end(), random);
    Argmax<float> merged;
    for (const auto& part : parts) merged = MergeArgmax{}(merged, part);
    expect_same(whole, merged);
  }
}

}  // namespace

int main() {
  test_conversions();
  test_ties_nan_and_hopeless_rows();
  test_any_split_and_the_blocked_scan_agree();
}
