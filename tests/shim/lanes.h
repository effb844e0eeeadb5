// What both engines have in common: lanes, the warps and blocks that they form, and the one rule of
// meeting. A barrier, a shuffle and the end of the body are all the same thing here: every lane of
// the group comes to the same place. Where lanes come to different places, a GPU would hang or hand
// out garbage; here the last one to arrive reports it.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_THREAD__)
extern "C" {
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace cuda_shim {

constexpr unsigned kWarpSize = 32;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Dim {
  unsigned x;
};

// A place in a kernel body where lanes meet.
class Place {
 public:
  Place() = default;
  Place(const char* what, const std::source_location& where) : what_(what), where_(where) {}

  bool operator==(const Place& other) const {
    return where_.line() == other.where_.line() && where_.column() == other.where_.column() &&
           is_same(where_.file_name(), other.where_.file_name()) && is_same(what_, other.what_);
  }
  std::string text() const {
    if (is_same(what_, kEnd)) return "its end";
    return std::string(what_) + " at " + where_.file_name() + ":" + std::to_string(where_.line());
  }
  static Place end() { return {}; }

 private:
  static constexpr const char* kEnd = "end";

  const char* what_ = kEnd;
  std::source_location where_;

  static bool is_same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }
};

// The lanes of a warp, or of a block, as they meet again and again.
class Group {
 public:
  struct Seat {
    Place place;
    uint64_t value = 0;
  };

  Group(unsigned first_lane, unsigned num_lanes)
      : first_lane_(first_lane),
        num_lanes_(num_lanes),
        seats_{std::vector<Seat>(num_lanes), std::vector<Seat>(num_lanes)} {}

  unsigned first_lane() const { return first_lane_; }
  unsigned num_lanes() const { return num_lanes_; }

  // Two sets of seats in turn: a lane may be one meeting ahead of another, never two.
  std::vector<Seat>& seats(unsigned parity) { return seats_[parity]; }

  // What is wrong with a meeting that all have come to.
  std::optional<std::string> problem(unsigned parity) const {
    const std::vector<Seat>& seats = seats_[parity];
    for (unsigned i = 1; i < num_lanes_; ++i) {
      if (!(seats[i].place == seats[0].place)) return text(seats, 0) + ", but " + text(seats, i);
    }
    return std::nullopt;
  }

 private:
  std::string text(const std::vector<Seat>& seats, unsigned i) const {
    return "thread " + std::to_string(first_lane_ + i) + " is at " + seats[i].place.text();
  }

  unsigned first_lane_;
  unsigned num_lanes_;
  std::array<std::vector<Seat>, 2> seats_;
};

struct Block;

struct Lane {
  Block* block = nullptr;
  Dim thread{};
  // Of its next meeting.
  unsigned warp_parity = 0;
  unsigned block_parity = 0;

  unsigned warp() const { return thread.x / kWarpSize; }
  unsigned rank() const { return thread.x % kWarpSize; }
};

struct Block {
  Dim index, size, grid;
  std::vector<Lane> lanes;
  std::vector<Group> warps;
  Group whole;
  std::unique_ptr<std::byte[]> shared;

  Block(unsigned block, unsigned num_blocks, unsigned num_threads, size_t shared_size)
      : index{block},
        size{num_threads},
        grid{num_blocks},
        lanes(num_threads),
        whole(0, num_threads),
        shared(std::make_unique<std::byte[]>(shared_size)) {
    std::memset(shared.get(), 0xCD, shared_size);
    for (unsigned i = 0; i < num_threads; ++i) {
      lanes[i].block = this;
      lanes[i].thread = {i};
      if (i % kWarpSize == 0) warps.emplace_back(i, kWarpSize);
    }
  }
  Block(const Block&) = delete;
};

using Blocks = std::vector<std::unique_ptr<Block>>;

// Runs the lanes of a launch.
class Engine {
 public:
  virtual ~Engine() = default;
  // Returns when all lanes of the group are there.
  virtual void meet(Lane& lane, Group& group, unsigned parity) = 0;
  // Lets others go first, perhaps.
  virtual void pause() = 0;
  [[noreturn]] virtual void fail(std::string problem) = 0;
};

inline Engine* current_engine = nullptr;
inline thread_local Lane* current_lane = nullptr;

// While one of these lives, ThreadSanitizer takes nothing that its thread does as ordering memory:
// lanes that meet for a shuffle must wait for each other, but on a GPU only barriers order what
// they have read and written.
class Unordered {
 public:
#if defined(__SANITIZE_THREAD__)
  Unordered() {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unordered() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }
#else
  Unordered() {}
#endif
  Unordered(const Unordered&) = delete;
};

// Takes a seat among the lanes of the warp and returns all of them, once they have been taken.
inline const std::vector<Group::Seat>& meet_warp(const Place& place, uint64_t value) {
  Lane& lane = *current_lane;
  const unsigned parity = lane.warp_parity;
  lane.warp_parity ^= 1;
  Group& warp = lane.block->warps[lane.warp()];
  std::vector<Group::Seat>& seats = warp.seats(parity);
  seats[lane.rank()] = {place, value};
  current_engine->meet(lane, warp, parity);
  return seats;
}

// The warp meets first: lanes of it that wait for different things are then found at once.
inline void meet_block(const Place& place) {
  meet_warp(place, 0);
  Lane& lane = *current_lane;
  const unsigned parity = lane.block_parity;
  lane.block_parity ^= 1;
  lane.block->whole.seats(parity)[lane.thread.x].place = place;
  current_engine->meet(lane, lane.block->whole, parity);
}

// What a lane does from first to last.
inline void run_lane(const std::function<void(Block&)>& body) {
  body(*current_lane->block);
  meet_block(Place::end());
}

}  // namespace cuda_shim
