// Runs a CUDA kernel body on the CPU, so that parallel code is tested where there is no GPU.
// Include this before the body's header: it supplies the CUDA names that bodies use, for grids and
// blocks of one dimension and warps that are always addressed whole.
//
// There are two engines, fibers in random order (fiber_engine.h) and real threads
// (thread_engine.h). What a GPU would answer with a hang or with garbage is an error here
// (lanes.h): thrown by the fibers, the end of the process with threads. Shared memory starts as
// 0xCD bytes, so that what was never written shows.
#pragma once

#include <cstdint>
#include <source_location>
#include <type_traits>

#include "fiber_engine.h"
#include "lanes.h"
#include "thread_engine.h"

namespace cuda_shim {

struct Options {
  uint64_t seed = 0;  // 0: in order
  bool threads = false;
};

// Runs body(shared) in all lanes of num_blocks blocks of num_threads.
template <typename Shared, typename Body>
void launch(unsigned num_blocks, unsigned num_threads, const Options& options, const Body& body) {
  if (num_blocks == 0 || num_threads == 0 || num_threads % kWarpSize != 0) {
    throw Error("a launch of " + std::to_string(num_blocks) + " blocks of " +
                std::to_string(num_threads) + " threads; expected at least one, of whole warps");
  }
  Blocks blocks;
  for (unsigned b = 0; b < num_blocks; ++b) {
    blocks.push_back(std::make_unique<Block>(b, num_blocks, num_threads, sizeof(Shared)));
  }
  const std::function<void(Block&)> run_body = [&](Block& block) {
    body(*reinterpret_cast<Shared*>(block.shared.get()));
  };
  const auto run = [](auto&& engine) {
    struct Current {
      explicit Current(Engine* engine) { current_engine = engine; }
      ~Current() { current_engine = nullptr; }
    } current(&engine);
    engine.run();
  };
  if (options.threads) {
    run(ThreadEngine(blocks, run_body, options.seed));
  } else {
    run(FiberEngine(blocks, run_body, options.seed));
  }
}

// To be called where another lane's access may come in between: before atomics.
inline void scheduling_point() {
  if (current_engine != nullptr) current_engine->pause();
}

inline void check_mask(const char* what, unsigned mask) {
  if (mask != 0xffffffff) current_engine->fail(std::string(what) + " of less than a whole warp");
}

// All lanes' values, from a warp operation that all of them have come to.
template <typename T>
class WarpValues {
 public:
  WarpValues(const char* what, unsigned mask, T own, const std::source_location& where)
      : own_(own) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 32 or 64 bits");
    static_assert(std::is_arithmetic_v<T>);
    check_mask(what, mask);
    uint64_t bits = 0;
    std::memcpy(&bits, &own, sizeof own);
    const Unordered unordered;
    seats_ = &meet_warp(Place(what, where), bits);
  }
  T operator[](unsigned lane) const {
    T value;
    const Unordered unordered;
    std::memcpy(&value, &(*seats_)[lane].value, sizeof value);
    return value;
  }
  // The own value where there is no such lane, as on a GPU.
  T at_or_own(int64_t lane) const {
    return lane < 0 || lane >= kWarpSize ? own_ : (*this)[static_cast<unsigned>(lane)];
  }

 private:
  T own_;
  const std::vector<Group::Seat>* seats_;
};

}  // namespace cuda_shim

#define __device__
#define __global__
#define __forceinline__ inline

#define threadIdx (cuda_shim::current_lane->thread)
#define blockIdx (cuda_shim::current_lane->block->index)
#define blockDim (cuda_shim::current_lane->block->size)
#define gridDim (cuda_shim::current_lane->block->grid)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  cuda_shim::meet_block({"__syncthreads", where});
}

inline void __syncwarp(unsigned mask = 0xffffffff,
                       std::source_location where = std::source_location::current()) {
  cuda_shim::check_mask("__syncwarp", mask);
  cuda_shim::meet_warp({"__syncwarp", where}, 0);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane,
              std::source_location where = std::source_location::current()) {
  const cuda_shim::WarpValues<T> values("__shfl_sync", mask, value, where);
  return values[static_cast<unsigned>(lane) % cuda_shim::kWarpSize];
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask,
                  std::source_location where = std::source_location::current()) {
  const cuda_shim::WarpValues<T> values("__shfl_xor_sync", mask, value, where);
  return values.at_or_own(cuda_shim::current_lane->rank() ^ static_cast<unsigned>(lane_mask));
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta,
                 std::source_location where = std::source_location::current()) {
  const cuda_shim::WarpValues<T> values("__shfl_up_sync", mask, value, where);
  return values.at_or_own(int64_t{cuda_shim::current_lane->rank()} - delta);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta,
                   std::source_location where = std::source_location::current()) {
  const cuda_shim::WarpValues<T> values("__shfl_down_sync", mask, value, where);
  return values.at_or_own(int64_t{cuda_shim::current_lane->rank()} + delta);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              std::source_location where = std::source_location::current()) {
  const cuda_shim::WarpValues<int> values("__ballot_sync", mask, predicate, where);
  unsigned ballot = 0;
  for (unsigned i = 0; i < cuda_shim::kWarpSize; ++i) ballot |= (values[i] != 0) * (1u << i);
  return ballot;
}

inline int __any_sync(unsigned mask, int predicate,
                      std::source_location where = std::source_location::current()) {
  const cuda_shim::WarpValues<int> values("__any_sync", mask, predicate, where);
  int any = 0;
  for (unsigned i = 0; i < cuda_shim::kWarpSize; ++i) any |= values[i] != 0;
  return any;
}
