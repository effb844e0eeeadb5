// The shim itself, on toy kernels: it brings up orders in which a missing barrier shows, warp
// operations give what CUDA's give, and what a GPU would not forgive is reported.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "../cpp/check.h"
#include "cuda_shim.h"

namespace {

using cuda_shim::launch;
using cuda_shim::Options;

constexpr unsigned kAll = 0xffffffff;

struct Nothing {};

struct Sums {
  uint64_t of_warp[4];
};

// The sum of 1..128 by one block, with the barrier that it needs or without.
uint64_t block_sum(bool has_barrier, const Options& options) {
  uint64_t total = 0;
  launch<Sums>(1, 128, options, [&](Sums& shared) {
    uint64_t sum = threadIdx.x + 1;
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAll, sum, mask);
    if (threadIdx.x % 32 == 0) shared.of_warp[threadIdx.x / 32] = sum;
    if (has_barrier) __syncthreads();
    if (threadIdx.x == 0) {
      total = std::accumulate(shared.of_warp, shared.of_warp + 4, uint64_t{0});
    }
  });
  return total;
}

void test_a_block_sum_is_right_in_every_order() {
  for (uint64_t seed = 0; seed < 200; ++seed) CHECK(block_sum(true, {seed}) == 128 * 129 / 2);
  for (uint64_t seed = 0; seed < 3; ++seed) CHECK(block_sum(true, {seed, true}) == 128 * 129 / 2);
}

void test_without_its_barrier_it_is_wrong_in_some() {
  int num_wrong = 0;
  for (uint64_t seed = 1; seed < 20; ++seed) num_wrong += block_sum(false, {seed}) != 128 * 129 / 2;
  CHECK(num_wrong > 0);
}

// Warp operations against their definition, for values of both widths.
template <typename T>
void test_warp_operations(const Options& options) {
  const auto value = [](unsigned lane) { return static_cast<T>(1000 + 7 * lane); };
  launch<Nothing>(2, 64, options, [&](Nothing&) {
    const unsigned lane = threadIdx.x % 32;
    for (unsigned k = 0; k < 32; ++k) {
      const T own = value(lane);
      CHECK(__shfl_sync(kAll, own, static_cast<int>(k)) == value(k));
      CHECK(__shfl_xor_sync(kAll, own, static_cast<int>(k)) == value(lane ^ k));
      CHECK(__shfl_up_sync(kAll, own, k) == value(lane < k ? lane : lane - k));
      CHECK(__shfl_down_sync(kAll, own, k) == value(lane + k > 31 ? lane : lane + k));
      CHECK(__ballot_sync(kAll, lane >= k) == kAll << k);
      CHECK(__any_sync(kAll, lane == k) == 1 && __any_sync(kAll, 0) == 0);
    }
  });
}

// The order in which the blocks' first lanes come by.
std::vector<unsigned> arrivals(uint64_t seed) {
  std::vector<unsigned> order;
  launch<Nothing>(4, 64, {seed}, [&](Nothing&) {
    for (int round = 0; round < 3; ++round) {
      if (threadIdx.x == 0) order.push_back(blockIdx.x);
      __syncthreads();
    }
  });
  return order;
}

void test_seeds_give_orders() {
  CHECK((arrivals(0) == std::vector<unsigned>{0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3}));
  std::set<std::vector<unsigned>> orders;
  std::set<unsigned> first;
  bool is_interleaved = false;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const auto order = arrivals(seed);
    CHECK(order == arrivals(seed));
    orders.insert(order);
    first.insert(order[0]);
    is_interleaved |= order[0] != order[1] && order[0] == order[2];
  }
  CHECK(orders.size() > 20 && first.size() == 4 && is_interleaved);
}

// Two steps that should have been one: others come in between only where the kernel says they may.
int64_t count_in_two_steps(bool has_point, uint64_t seed) {
  int64_t counter = 0;
  launch<Nothing>(3, 32, {seed}, [&](Nothing&) {
    const int64_t before = counter;
    if (has_point) cuda_shim::scheduling_point();
    counter = before + 1;
  });
  return counter;
}

void test_scheduling_points_let_others_in() {
  CHECK(count_in_two_steps(false, 1) == 96);
  CHECK(count_in_two_steps(true, 0) == 96);
  for (uint64_t seed = 1; seed < 20; ++seed) CHECK(count_in_two_steps(true, seed) < 96);
}

void test_shared_memory_starts_with_garbage_in_every_block() {
  launch<Sums>(3, 32, {5}, [&](Sums& shared) {
    if (threadIdx.x == 0) CHECK(shared.of_warp[3] == 0xCDCDCDCDCDCDCDCDull);
    __syncwarp();
    shared.of_warp[3] = 0;
  });
}

template <typename Body>
void expect_error(const std::string& message, const Body& body) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    std::string error;
    try {
      launch<Nothing>(2, 64, {seed}, [&](Nothing&) { body(); });
    } catch (const cuda_shim::Error& caught) {
      error = caught.what();
    }
    if (error.find(message) == std::string::npos) {
      std::fprintf(stderr, "expected an error with '%s', got '%s'\n", message.c_str(),
                   error.c_str());
      std::exit(1);
    }
  }
}

void divergent_barrier() {
  if (threadIdx.x != 40) __syncthreads();
}

void test_what_a_gpu_would_hang_on_is_reported() {
  expect_error("but thread 40 is at its end", divergent_barrier);
  expect_error("thread 0 is at its end, but thread 32 is at __syncthreads", [] {
    if (threadIdx.x >= 32) __syncthreads();
  });
  expect_error("__syncwarp at", [] {
    if (threadIdx.x % 32 == 3) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  });
  // The same operation at another place is another one.
  expect_error("__shfl_xor_sync at", [] {
    if (threadIdx.x % 2 == 0) {
      __shfl_xor_sync(kAll, 1, 1);
    } else {
      __shfl_xor_sync(kAll, 2, 1);
    }
  });
  expect_error("is at its end", [] {
    if (threadIdx.x != 9) __shfl_sync(kAll, 1, 0);
  });
  expect_error("less than a whole warp", [] { __shfl_sync(0xffff, 1, 0); });
  // A lane that waits for memory that nobody writes.
  expect_error("no lane comes to another", [] {
    if (threadIdx.x == 0) {
      while (true) cuda_shim::scheduling_point();
    }
    __syncwarp();
  });
}

// Threads cannot be called back, so the process ends.
void test_a_divergent_barrier_ends_threads() {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    launch<Nothing>(2, 64, {1, true}, [](Nothing&) { divergent_barrier(); });
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}

}  // namespace

int main() {
  test_a_block_sum_is_right_in_every_order();
  test_without_its_barrier_it_is_wrong_in_some();
  for (const Options& options : {Options{0}, Options{1}, Options{2}, Options{3, true}}) {
    test_warp_operations<int32_t>(options);
    test_warp_operations<uint32_t>(options);
    test_warp_operations<int64_t>(options);
    test_warp_operations<float>(options);
    test_warp_operations<double>(options);
  }
  test_seeds_give_orders();
  test_scheduling_points_let_others_in();
  test_shared_memory_starts_with_garbage_in_every_block();
  test_what_a_gpu_would_hang_on_is_reported();
  test_a_divergent_barrier_ends_threads();
}
