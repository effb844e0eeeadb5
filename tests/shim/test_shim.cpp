// The shim itself: it orders lanes and blocks arbitrarily, and sees what a GPU would not forgive.
#include <cstdint>
#include <numeric>
#include <vector>

#include "../cpp/check.h"
#include "cuda_shim.h"

namespace {

struct Sums {
  uint64_t warps[8];
};

// A block sum with and without the barrier that it needs.
uint64_t block_sum(bool with_barrier, uint64_t seed, bool threads = false) {
  std::vector<uint64_t> values(128);
  std::iota(values.begin(), values.end(), 1u);
  uint64_t total = 0;
  cuda_shim::launch<Sums>(1, 128, {seed, threads}, [&](Sums& shared) {
    uint64_t sum = values[threadIdx.x];
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
    if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = sum;
    if (with_barrier) __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 0; warp < 4; ++warp) total += shared.warps[warp];
    }
  });
  return total;
}

void test_a_missing_barrier_shows() {
  int num_wrong = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    CHECK(block_sum(true, seed) == 128 * 129 / 2);
    num_wrong += block_sum(false, seed) != 128 * 129 / 2;
  }
  CHECK(num_wrong > 25);
  CHECK(block_sum(true, 0, true) == 128 * 129 / 2);
}

void test_blocks_run_in_any_order_and_interleaved() {
  bool saw_reverse = false, saw_interleaving = false;
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    std::vector<unsigned> entered, left;
    cuda_shim::launch<Sums>(2, 32, {seed}, [&](Sums&) {
      if (threadIdx.x == 0) entered.push_back(blockIdx.x);
      __syncthreads();
      if (threadIdx.x == 0) left.push_back(blockIdx.x);
    });
    CHECK(entered.size() == 2 && left.size() == 2);
    saw_reverse |= entered[0] == 1;
    saw_interleaving |= entered[0] != left[0];
  }
  CHECK(saw_reverse && saw_interleaving);
}

void test_lanes_run_in_any_order() {
  bool saw_last_lane_first = false;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    std::vector<unsigned> order;
    cuda_shim::launch<Sums>(1, 32, {seed}, [&](Sums&) { order.push_back(threadIdx.x); });
    CHECK(order.size() == 32);
    saw_last_lane_first |= order[0] == 31;
  }
  CHECK(saw_last_lane_first);
}

template <typename Body>
std::string error_of(unsigned num_threads, const Body& body) {
  try {
    cuda_shim::launch<Sums>(1, num_threads, {1}, body);
  } catch (const cuda_shim::Error& error) {
    return error.what();
  }
  return "";
}

void test_divergence_is_an_error() {
  const auto starts_with = [](const std::string& text, const char* start) {
    return text.rfind(start, 0) == 0;
  };
  const std::string two_shuffles = error_of(32, [](Sums&) {
    if (threadIdx.x < 16) {
      __shfl_sync(0xffffffff, 1, 0);
    } else {
      __shfl_sync(0xffffffff, 1, 0);
    }
  });
  CHECK(starts_with(two_shuffles, "divergent warp"));
  const std::string lane_is_gone = error_of(32, [](Sums&) {
    if (threadIdx.x != 3) __syncwarp();
  });
  CHECK(starts_with(lane_is_gone, "divergent warp"));
  const std::string warp_is_gone = error_of(64, [](Sums&) {
    if (threadIdx.x < 32) __syncthreads();
  });
  CHECK(starts_with(warp_is_gone, "deadlock"));
}

void test_shared_memory_is_not_zero_by_accident() {
  uint64_t found = 0;
  cuda_shim::launch<Sums>(1, 32, {}, [&](Sums& shared) {
    if (threadIdx.x == 0) found = shared.warps[0];
  });
  CHECK(found != 0);
}

}  // namespace

int main() {
  test_a_missing_barrier_shows();
  test_blocks_run_in_any_order_and_interleaved();
  test_lanes_run_in_any_order();
  test_divergence_is_an_error();
  test_shared_memory_is_not_zero_by_accident();
}
