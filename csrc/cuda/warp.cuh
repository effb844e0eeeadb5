// A warp as the core's group of lanes, and values that travel between lanes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "argmax.h"
#include "draw.h"
#include "row_choice.h"
#include "strided.h"

namespace adaptive_spec::cuda {

constexpr uint32_t kAllLanes = 0xffffffff;
constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;  // of a block

// A row that the lanes of a warp hold between them: loaded once, all loads in flight together, and
// then read by any lane through a shuffle. What does not fit is read from memory when asked for.
template <typename T>
class WarpRow {
 public:
  using Value = std::remove_const_t<T>;

  __device__ __forceinline__ WarpRow(Vector<T> row, int64_t n) : row_(row) {
    const int lane = threadIdx.x % kWarpSize;
    if (lane < n) low_ = row[lane];
    if (lane + kWarpSize < n) high_ = row[lane + kWarpSize];
  }
  // i is the same in all lanes.
  __device__ __forceinline__ Value operator[](int64_t i) const {
    if (i < kWarpSize) return __shfl_sync(kAllLanes, low_, static_cast<int>(i));
    if (i < 2 * kWarpSize) return __shfl_sync(kAllLanes, high_, static_cast<int>(i) - kWarpSize);
    return row_[i];
  }

 private:
  Vector<T> row_;
  Value low_{};
  Value high_{};
};

struct WarpGroup {
  __device__ __forceinline__ int64_t rank() const { return threadIdx.x % kWarpSize; }
  __device__ __forceinline__ int64_t size() const { return kWarpSize; }

  template <typename T>
  __device__ __forceinline__ WarpRow<T> load(Vector<T> row, int64_t n) const {
    return {row, n};
  }
};

__device__ __forceinline__ int64_t warp_sum(int64_t value) {
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, mask);
  }
  return value;
}

// Sum over this lane and those before it.
__device__ __forceinline__ int64_t warp_prefix_sum(int64_t value) {
  const int lane = threadIdx.x % kWarpSize;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int64_t before = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

// Partial results of any kind, merged.
template <typename T>
__device__ __forceinline__ Argmax<T> merge(const Argmax<T>& a, const Argmax<T>& b) {
  return MergeArgmax{}(a, b);
}
__device__ __forceinline__ RowSum merge(const RowSum& a, const RowSum& b) {
  return {a.units + b.units, merge(a.best, b.best)};
}

// Those of all lanes, in every lane.
template <typename T>
__device__ __forceinline__ Argmax<T> warp_merge(Argmax<T> best) {
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    Argmax<T> other;
    other.value = __shfl_xor_sync(kAllLanes, best.value, mask);
    other.index = __shfl_xor_sync(kAllLanes, best.index, mask);
    other.has_nan = __shfl_xor_sync(kAllLanes, static_cast<int>(best.has_nan), mask) != 0;
    best = merge(best, other);
  }
  return best;
}
__device__ __forceinline__ RowSum warp_merge(const RowSum& sum) {
  return {warp_sum(sum.units), warp_merge(sum.best)};
}
__device__ __forceinline__ RowSums warp_merge(const RowSums& sums) {
  return {warp_sum(sums.count), warp_sum(sums.units), warp_sum(sums.kept_units),
          warp_merge(sums.best)};
}

// The threads' partial results merged, in every lane of warp 0. Also a barrier.
template <typename T>
__device__ __forceinline__ T block_merge(T partial, T (&shared)[kMaxWarps]) {
  const int lane = threadIdx.x % kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  partial = warp_merge(partial);
  if (lane == 0) shared[threadIdx.x / kWarpSize] = partial;
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return partial;
  return warp_merge(lane < num_warps ? shared[lane] : T{});
}

}  // namespace adaptive_spec::cuda
