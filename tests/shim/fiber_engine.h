// All lanes of all blocks in one thread, switching at meetings and pauses. A seeded generator picks
// who goes on, so any interleaving of lanes and blocks can come up, and comes up again with the
// same seed.
#pragma once

#include <algorithm>
#include <random>
#include <utility>

#include "context.h"
#include "lanes.h"

namespace cuda_shim {

class FiberEngine final : public Engine {
 public:
  // Seed 0: block after block, lane after lane, as far as barriers allow.
  FiberEngine(Blocks& blocks, const std::function<void(Block&)>& body, uint64_t seed)
      : body_(body), random_(seed), is_ordered_(seed == 0), num_left_(blocks.size()) {
    // How often the next lane is any lane, in 64ths; else it is one of those that were the last to
    // be set going. Rarely: blocks run one by one. Always: all advance together.
    constexpr uint64_t kScatter[] = {0, 1, 16, 64};
    scatter_ = kScatter[random_() % std::size(kScatter)];

    static std::vector<Stack> stacks;  // kept for the next launch
    // Blocks start in order, as a GPU would mostly have it, or in any.
    std::vector<Block*> order;
    for (size_t i = blocks.size(); i-- > 0;) order.push_back(blocks[i].get());
    if (!is_ordered_ && random_() % 2 == 0) std::shuffle(order.begin(), order.end(), random_);
    const size_t num_threads = blocks[0]->lanes.size();
    fibers_.resize(blocks.size() * num_threads);
    while (stacks.size() < fibers_.size()) stacks.emplace_back();
    for (size_t i = 0; i < fibers_.size(); ++i) {
      fibers_[i].lane = &blocks[i / num_threads]->lanes[i % num_threads];
      fibers_[i].context.start(stacks[i], &FiberEngine::start);
    }
    num_warps_ = num_threads / kWarpSize;
    num_arrived_.resize(blocks.size() * (num_warps_ + 1));
    for (Block* block : order) set_going(*block, block->whole);
  }

  void run() {
    resume(pick(), caller_);
    if (!problem_.empty()) throw Error(problem_);
  }

  void meet(Lane& lane, Group& group, unsigned parity) override {
    num_pauses_ = 0;
    Block& block = *lane.block;
    const bool is_block = &group == &block.whole;
    const bool is_end = is_block && group.seats(parity)[lane.thread.x].place == Place::end();
    unsigned& num_arrived =
        num_arrived_[block.index.x * (num_warps_ + 1) + (is_block ? num_warps_ : lane.warp())];
    if (++num_arrived == group.num_lanes()) {
      num_arrived = 0;
      if (has_problem(block, group, parity)) leave(lane, caller_);
      if (!is_end) {
        set_going(block, group);
      } else if (--num_left_ == 0) {
        leave(lane, caller_);
      }
    }
    Fiber& next = pick();
    if (is_end) {
      current_lane = next.lane;
      leave(lane, next.context);
    }
    resume(next, fiber_of(lane).context);
  }

  void pause() override {
    if (++num_pauses_ > kPatience) fail("no lane comes to another barrier, shuffle or end");
    if (is_ordered_ || random_() % 2 == 0) return;
    Fiber& self = fiber_of(*current_lane);
    going_.push_back(&self);
    std::swap(going_.back(), going_[random_() % going_.size()]);
    resume(pick(), self.context);
  }

  [[noreturn]] void fail(std::string problem) override {
    // Moved: frames that are left for good free nothing.
    problem_ = std::move(problem);
    leave(*current_lane, caller_);
  }

 private:
  // Pauses in a row, without any meeting, that no honest body makes.
  static constexpr int kPatience = 1'000'000;

  struct Fiber {
    Lane* lane;
    Context context;
  };

  static void start() {
    Context::entered();
    run_lane(static_cast<FiberEngine*>(current_engine)->body_);
    __builtin_unreachable();
  }

  Fiber& fiber_of(const Lane& lane) {
    return fibers_[lane.block->index.x * lane.block->lanes.size() + lane.thread.x];
  }

  bool has_problem(const Block& block, const Group& group, unsigned parity) {
    const auto problem = group.problem(parity);
    if (problem) problem_ = "block " + std::to_string(block.index.x) + ": " + *problem;
    return problem.has_value();
  }

  void set_going(Block& block, const Group& group) {
    const auto old_size = static_cast<std::ptrdiff_t>(going_.size());
    Fiber* first = &fiber_of(block.lanes[group.first_lane()]);
    for (unsigned i = group.num_lanes(); i-- > 0;) going_.push_back(first + i);
    if (!is_ordered_) std::shuffle(going_.begin() + old_size, going_.end(), random_);
  }

  Fiber& pick() {
    if (!is_ordered_ && random_() % 64 < scatter_) {
      std::swap(going_.back(), going_[random_() % going_.size()]);
    }
    Fiber* next = going_.back();
    going_.pop_back();
    return *next;
  }

  void resume(Fiber& next, Context& self) {
    if (&next.context == &self) return;
    current_lane = next.lane;
    self.switch_to(next.context);
  }

  [[noreturn]] void leave(const Lane& lane, Context& next) {
    fiber_of(lane).context.leave_for(next);
  }

  const std::function<void(Block&)>& body_;
  std::mt19937_64 random_;
  bool is_ordered_;
  uint64_t scatter_;
  size_t num_left_;
  size_t num_warps_;
  std::vector<Fiber> fibers_;
  std::vector<unsigned> num_arrived_;  // by block: its warps', then its own
  std::vector<Fiber*> going_;          // the most recent last
  int num_pauses_ = 0;
  std::string problem_;
  Context caller_;
};

}  // namespace cuda_shim
