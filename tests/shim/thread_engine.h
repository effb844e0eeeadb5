// A real thread per lane, all at once, for ThreadSanitizer: barriers order what they would order on
// a GPU, and nothing else does.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "lanes.h"

namespace cuda_shim {

class ThreadEngine final : public Engine {
 public:
  ThreadEngine(Blocks& blocks, const std::function<void(Block&)>& body, uint64_t seed)
      : blocks_(blocks), body_(body), random_(seed), num_warps_(blocks[0]->warps.size()) {
    for (auto& block : blocks) {
      for (Group& warp : block->warps) add_barrier(*block, warp);
      add_barrier(*block, block->whole);
    }
  }

  void run() {
    std::vector<Lane*> order;
    for (auto& block : blocks_) {
      for (Lane& lane : block->lanes) order.push_back(&lane);
    }
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<std::thread> threads;
    for (Lane* lane : order) {
      threads.emplace_back([this, lane] {
        current_lane = lane;
        run_lane(body_);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void meet(Lane& lane, Group& group, unsigned /*parity*/) override {
    const Block& block = *lane.block;
    const size_t place = &group == &block.whole ? num_warps_ : lane.warp();
    barriers_[block.index.x * (num_warps_ + 1) + place]->arrive_and_wait();
  }

  void pause() override { std::this_thread::yield(); }

  // The other lanes cannot be called back.
  [[noreturn]] void fail(std::string problem) override {
    std::fprintf(stderr, "cuda_shim: %s\n", problem.c_str());
    std::_Exit(1);
  }

 private:
  // By the lane that arrives last, before any goes on.
  struct Check {
    ThreadEngine* engine;
    unsigned block;
    const Group* group;
    unsigned parity = 0;

    void operator()() noexcept {
      if (const auto problem = group->problem(parity)) {
        engine->fail("block " + std::to_string(block) + ": " + *problem);
      }
      parity ^= 1;
    }
  };

  void add_barrier(const Block& block, const Group& group) {
    barriers_.push_back(std::make_unique<std::barrier<Check>>(group.num_lanes(),
                                                              Check{this, block.index.x, &group}));
  }

  Blocks& blocks_;
  const std::function<void(Block&)>& body_;
  std::mt19937_64 random_;
  size_t num_warps_;
  std::vector<std::unique_ptr<std::barrier<Check>>> barriers_;  // by block: its warps', its own
};

}  // namespace cuda_shim
