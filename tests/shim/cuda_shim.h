// Runs a CUDA kernel body on the CPU, to test parallel code where there is no GPU.
//
// Include this before the body's header: it supplies the CUDA names that bodies use. A launch runs
// on one of two engines:
//
// - Fibers, in one thread. A seeded generator picks how many blocks are resident at once and in
// which
//   order they come, which warp goes on, and in which order its lanes do. A lane runs until its
//   next barrier or shuffle.
// - Threads, one per lane, all at once; barriers are real ones. For ThreadSanitizer, which then
// sees
//   the same synchronisation that a GPU would.
//
// What a GPU would answer with a hang or with garbage is an Error here: lanes of a warp that meet
// at different places, a barrier that some lanes never reach. Shared memory starts as 0xCD bytes.
// Grids and blocks have one dimension, and a warp is always addressed whole.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <source_location>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __device__
#define __global__
#define __forceinline__ inline

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace cuda_shim {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr unsigned kWarpSize = 32;

struct Dim {
  unsigned x;
};

enum class Wait { kNothing, kWarp, kBlock, kDone };

struct Block;
struct Warp;

struct Lane {
  Block* block;
  Warp* warp;
  Dim thread;
  unsigned parity = 0;  // of the warp's next meeting
  // Fibers only.
  Wait wait = Wait::kNothing;
  std::source_location where;
  bool is_started = false;
  jmp_buf resume;
  ucontext_t context;
  char* stack = nullptr;
};

struct Warp {
  // Two sets of slots in turn: a lane cannot be two meetings ahead of another.
  uint64_t slots[2][kWarpSize];
  unsigned num_lanes;
  std::unique_ptr<std::barrier<>> barrier;
};

struct Block {
  Dim index, size, grid;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::unique_ptr<std::byte[]> shared;
  std::unique_ptr<std::barrier<>> barrier;
};

struct Options {
  uint64_t seed = 0;  // 0: in order
  bool threads = false;
};

inline thread_local Lane* current = nullptr;

namespace detail {

constexpr size_t kStackSize = 64 * 1024;

// The fiber engine. One launch at a time.
class Fibers {
 public:
  static Fibers*& active() {
    static Fibers* engine = nullptr;
    return engine;
  }

  Fibers(std::vector<Block>& blocks, const std::function<void(Block&)>& body, uint64_t seed)
      : blocks_(blocks), body_(body), random_(seed), is_shuffled_(seed != 0) {
    size_t num_lanes = 0;
    for (Block& block : blocks_) num_lanes += block.lanes.size();
    static std::vector<std::unique_ptr<char[]>> stacks;  // kept from launch to launch
    while (stacks.size() < num_lanes) stacks.push_back(std::make_unique<char[]>(kStackSize));
    size_t next = 0;
    for (Block& block : blocks_) {
      for (Lane& lane : block.lanes) lane.stack = stacks[next++].get();
    }
  }

  void run() {
    active() = this;
    std::vector<Block*> queue;
    for (Block& block : blocks_) queue.push_back(&block);
    size_t num_resident = 1;
    if (is_shuffled_) {
      // Either in order, as blocks are usually dispatched, or in any.
      if (random_() % 2) std::shuffle(queue.begin(), queue.end(), random_);
      num_resident += random_() % queue.size();
    }
    std::vector<std::pair<Block*, Warp*>> runnable;
    size_t num_started = 0;
    const auto start_next = [&] {
      if (num_started == queue.size()) return;
      Block& block = *queue[num_started++];
      for (Warp& warp : block.warps) runnable.push_back({&block, &warp});
    };
    for (size_t i = 0; i < num_resident; ++i) start_next();

    for (size_t num_done = 0; num_done < queue.size();) {
      if (runnable.empty()) fail_deadlock();
      const size_t pick = is_shuffled_ ? random_() % runnable.size() : 0;
      const auto [block, warp] = runnable[pick];
      runnable.erase(runnable.begin() + static_cast<std::ptrdiff_t>(pick));
      run_lanes(*block, *warp);
      switch (meeting(*block, *warp)) {
        case Wait::kWarp:
          release(*block, *warp);
          runnable.push_back({block, warp});
          break;
        case Wait::kDone:
          if (all_wait_for(*block, Wait::kDone)) {
            ++num_done;
            start_next();
          }
          break;
        default:
          if (all_wait_for(*block, Wait::kBlock)) {
            for (Warp& each : block->warps) {
              release(*block, each);
              runnable.push_back({block, &each});
            }
          }
      }
    }
    active() = nullptr;
  }

  // By a lane: lets others go on until the scheduler resumes it.
  void wait(Wait what, const std::source_location& where) {
    Lane* const self = current;
    self->wait = what;
    self->where = where;
    switch_to_scheduler(self);
    current = self;
  }

 private:
  static Lane* lanes_of(Block& block, Warp& warp) {
    return block.lanes.data() + (&warp - block.warps.data()) * kWarpSize;
  }

  void run_lanes(Block& block, Warp& warp) {
    Lane* lanes = lanes_of(block, warp);
    unsigned order[kWarpSize];
    for (unsigned i = 0; i < warp.num_lanes; ++i) order[i] = i;
    if (is_shuffled_) std::shuffle(order, order + warp.num_lanes, random_);
    for (unsigned i = 0; i < warp.num_lanes; ++i) {
      if (lanes[order[i]].wait == Wait::kNothing) switch_to(lanes[order[i]]);
    }
  }

  static std::string place(const Lane& lane) {
    if (lane.wait == Wait::kDone) return "its end";
    const std::string kind = lane.wait == Wait::kBlock ? "a block barrier" : "a warp operation";
    return kind + " at " + lane.where.file_name() + ":" + std::to_string(lane.where.line());
  }

  static bool is_same(const std::source_location& a, const std::source_location& b) {
    return a.line() == b.line() && a.column() == b.column() &&
           std::strcmp(a.file_name(), b.file_name()) == 0;
  }

  // What all lanes of the warp wait for; an error unless it is the same thing at the same place.
  Wait meeting(Block& block, Warp& warp) {
    const Lane* lanes = lanes_of(block, warp);
    for (unsigned i = 1; i < warp.num_lanes; ++i) {
      if (lanes[i].wait != lanes[0].wait ||
          (lanes[i].wait != Wait::kDone && !is_same(lanes[i].where, lanes[0].where))) {
        throw Error("divergent warp: block " + std::to_string(block.index.x) + ", thread " +
                    std::to_string(lanes[0].thread.x) + " is at " + place(lanes[0]) + ", thread " +
                    std::to_string(lanes[i].thread.x) + " at " + place(lanes[i]));
      }
    }
    return lanes[0].wait;
  }

  static bool all_wait_for(const Block& block, Wait what) {
    return std::all_of(block.lanes.begin(), block.lanes.end(),
                       [&](const Lane& lane) { return lane.wait == what; });
  }

  static void release(Block& block, Warp& warp) {
    Lane* lanes = lanes_of(block, warp);
    for (unsigned i = 0; i < warp.num_lanes; ++i) lanes[i].wait = Wait::kNothing;
  }

  [[noreturn]] void fail_deadlock() {
    for (Block& block : blocks_) {
      for (const Lane& lane : block.lanes) {
        if (lane.wait == Wait::kBlock) {
          throw Error("deadlock: block " + std::to_string(block.index.x) + ", thread " +
                      std::to_string(lane.thread.x) + " waits for ever at " + place(lane));
        }
      }
    }
    throw Error("deadlock");
  }

  static void start() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &active()->main_stack_, &active()->main_stack_size_);
#endif
    active()->body_(*current->block);
    current->wait = Wait::kDone;
    active()->switch_to_scheduler(current);
  }

#if defined(__SANITIZE_ADDRESS__)
  // AddressSanitizer has to be told about stacks, and does not follow longjmp between them.
  void switch_to(Lane& lane) {
    current = &lane;
    if (!lane.is_started) prepare(lane);
    __sanitizer_start_switch_fiber(&main_fake_stack_, lane.stack, kStackSize);
    swapcontext(&scheduler_, &lane.context);
    __sanitizer_finish_switch_fiber(main_fake_stack_, nullptr, nullptr);
  }
  void switch_to_scheduler(Lane* self) {
    void* fake_stack = nullptr;
    const bool ends = self->wait == Wait::kDone;
    __sanitizer_start_switch_fiber(ends ? nullptr : &fake_stack, main_stack_, main_stack_size_);
    swapcontext(&self->context, &scheduler_);
    __sanitizer_finish_switch_fiber(fake_stack, &main_stack_, &main_stack_size_);
  }
#else
  // swapcontext asks the kernel for the signal mask each time; only a lane's start needs it.
  void switch_to(Lane& lane) {
    current = &lane;
    if (_setjmp(scheduler_jump_) != 0) return;
    if (lane.is_started) _longjmp(lane.resume, 1);
    prepare(lane);
    setcontext(&lane.context);
  }
  void switch_to_scheduler(Lane* self) {
    if (_setjmp(self->resume) == 0) _longjmp(scheduler_jump_, 1);
  }
#endif

  void prepare(Lane& lane) {
    lane.is_started = true;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack;
    lane.context.uc_stack.ss_size = kStackSize;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, &Fibers::start, 0);
  }

  std::vector<Block>& blocks_;
  const std::function<void(Block&)>& body_;
  std::mt19937_64 random_;
  bool is_shuffled_;
  jmp_buf scheduler_jump_;
  ucontext_t scheduler_;
  void* main_fake_stack_ = nullptr;
  const void* main_stack_ = nullptr;
  size_t main_stack_size_ = 0;
};

inline void run_threads(std::vector<Block>& blocks, const std::function<void(Block&)>& body) {
  std::vector<std::thread> threads;
  for (Block& block : blocks) {
    block.barrier =
        std::make_unique<std::barrier<>>(static_cast<std::ptrdiff_t>(block.lanes.size()));
    for (Warp& warp : block.warps) {
      warp.barrier = std::make_unique<std::barrier<>>(warp.num_lanes);
    }
  }
  for (Block& block : blocks) {
    for (Lane& lane : block.lanes) {
      threads.emplace_back([&] {
        current = &lane;
        body(block);
        lane.warp->barrier->arrive_and_drop();
        block.barrier->arrive_and_drop();
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

inline void wait(Wait what, const std::source_location& where) {
  if (Fibers::active() != nullptr) {
    Fibers::active()->wait(what, where);
  } else if (what == Wait::kBlock) {
    current->block->barrier->arrive_and_wait();
  } else {
    current->warp->barrier->arrive_and_wait();
  }
}

// Every lane hands in a value and gets that of the lane that source(own lane) names.
template <typename T, typename Source>
T exchange(T value, const Source& source, const std::source_location& where) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  Lane* const self = current;
  const unsigned own = self->thread.x % kWarpSize;
  uint64_t* slots = self->warp->slots[self->parity];
  self->parity ^= 1;
  std::memcpy(&slots[own], &value, sizeof value);
  wait(Wait::kWarp, where);
  std::memcpy(&value, &slots[source(own)], sizeof value);
  return value;
}

inline void check_mask(unsigned mask) {
  if (mask != 0xffffffff) throw Error("only whole warps are supported");
}

}  // namespace detail

// Runs body(shared) in num_blocks blocks of num_threads lanes.
template <typename Shared, typename Body>
void launch(unsigned num_blocks, unsigned num_threads, const Options& options, const Body& body) {
  if (num_threads == 0 || num_threads % kWarpSize != 0) throw Error("whole warps only");
  std::vector<Block> blocks(num_blocks);
  for (unsigned b = 0; b < num_blocks; ++b) {
    Block& block = blocks[b];
    block.index = {b};
    block.size = {num_threads};
    block.grid = {num_blocks};
    block.shared = std::make_unique<std::byte[]>(sizeof(Shared));
    std::memset(block.shared.get(), 0xCD, sizeof(Shared));
    block.warps = std::vector<Warp>(num_threads / kWarpSize);
    for (Warp& warp : block.warps) warp.num_lanes = kWarpSize;
    block.lanes = std::vector<Lane>(num_threads);
    for (unsigned i = 0; i < num_threads; ++i) {
      block.lanes[i].block = &block;
      block.lanes[i].warp = &block.warps[i / kWarpSize];
      block.lanes[i].thread = {i};
    }
  }
  const std::function<void(Block&)> run = [&](Block& block) {
    body(*reinterpret_cast<Shared*>(block.shared.get()));
  };
  if (options.threads) {
    detail::run_threads(blocks, run);
  } else {
    struct Reset {
      ~Reset() { detail::Fibers::active() = nullptr; }
    } reset;
    detail::Fibers(blocks, run, options.seed).run();
  }
}

}  // namespace cuda_shim

#define threadIdx (cuda_shim::current->thread)
#define blockIdx (cuda_shim::current->block->index)
#define blockDim (cuda_shim::current->block->size)
#define gridDim (cuda_shim::current->block->grid)

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  cuda_shim::detail::wait(cuda_shim::Wait::kBlock, where);
}

inline void __syncwarp(unsigned mask = 0xffffffff,
                       std::source_location where = std::source_location::current()) {
  cuda_shim::detail::check_mask(mask);
  cuda_shim::detail::wait(cuda_shim::Wait::kWarp, where);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source,
              std::source_location where = std::source_location::current()) {
  cuda_shim::detail::check_mask(mask);
  return cuda_shim::detail::exchange(
      value, [&](unsigned) { return static_cast<unsigned>(source) % cuda_shim::kWarpSize; }, where);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes,
                  std::source_location where = std::source_location::current()) {
  cuda_shim::detail::check_mask(mask);
  return cuda_shim::detail::exchange(
      value, [&](unsigned own) { return own ^ static_cast<unsigned>(lanes); }, where);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance,
                 std::source_location where = std::source_location::current()) {
  cuda_shim::detail::check_mask(mask);
  return cuda_shim::detail::exchange(
      value, [&](unsigned own) { return own < distance ? own : own - distance; }, where);
}
