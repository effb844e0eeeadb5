// Scratch memory of the ops that spread one request over several thread blocks. It is an int64
// tensor that is zeroed once; every launch leaves its counters at zero again, so a graph can be
// replayed on it. Its first quarter holds the counters, the rest partial results that are written
// before they are read: the border depends on the tensor alone, so calls of any size can share it.
//
//   RoundTotals | RequestProgress[B] | row tickets, u32 [B * D]  ||  choices [B * D] | partials
#pragma once

#include <cstdint>

#include "draw.h"
#include "macros.h"
#include "records.h"
#include "walks.h"

namespace adaptive_spec {

// A row is split only while a batch's rows of one position give fewer pieces than this: by then
// they fill any device.
constexpr int64_t kMaxWavePieces = 1024;

struct RequestProgress {
  // The rows behind the first mismatch known so far need not be read: 0 while none is known, else
  // the number of positions from the mismatch on, so that earlier ones are larger.
  uint32_t stop;
  uint32_t ticket;  // rows done
};

// A row's choice as one word, so that a warp loads a request's choices at once.
AS_HD int64_t pack_choice(const TargetToken& choice) {
  return choice.id | static_cast<int64_t>(choice.is_valid) << 32 |
         static_cast<int64_t>(choice.is_anomaly) << 33;
}
AS_HD TargetToken unpack_choice(int64_t word) {
  return {word & 0xffff'ffff, (word >> 32 & 1) != 0, (word >> 33 & 1) != 0};
}

class Workspace {
 public:
  Workspace() = default;
  AS_HD Workspace(int64_t* words, int64_t num_words)
      : words_(words), results_(words + num_words / 4) {}

  AS_HD explicit operator bool() const { return words_ != nullptr; }

  // Words that serve every call with up to `batch_size` requests of up to `num_positions` (D) rows
  // that are scanned; 0 for the ops that are given the choices.
  AS_HD static constexpr int64_t num_words(int64_t batch_size, int64_t num_positions) {
    const int64_t num_rows = batch_size * num_positions;
    const int64_t counters = kTotalsWords + batch_size + (num_rows + 1) / 2;
    const int64_t wave = batch_size > kMaxWavePieces ? batch_size : kMaxWavePieces;
    const int64_t results = num_rows + num_positions * wave * kPieceWords;
    const int64_t third = (results + 2) / 3;
    return 4 * (counters > third ? counters : third);
  }

  AS_HD RoundTotals* totals() const { return reinterpret_cast<RoundTotals*>(words_); }
  AS_HD RequestProgress* request(int64_t b) const {
    return reinterpret_cast<RequestProgress*>(words_ + kTotalsWords) + b;
  }
  AS_HD uint32_t* row_ticket(int64_t batch_size, int64_t row) const {
    return reinterpret_cast<uint32_t*>(words_ + kTotalsWords + batch_size) + row;
  }
  AS_HD int64_t* choice(int64_t row) const { return results_ + row; }
  // For the ops that draw, which have no choices.
  AS_HD RowSum* row_sums(int64_t i) const { return reinterpret_cast<RowSum*>(results_) + i; }
  // What the given row's first piece gave; the others follow it.
  template <typename T>
  AS_HD T* partials(int64_t num_rows, int64_t row, int64_t num_pieces) const {
    static_assert(sizeof(T) <= kPieceWords * kWordSize);
    return reinterpret_cast<T*>(results_ + num_rows) + row * num_pieces;
  }

 private:
  static constexpr int64_t kTotalsWords = sizeof(RoundTotals) / kWordSize;
  // The most that an op keeps of a piece of a row.
  static constexpr int64_t kPieceWords = 6;
  static_assert(sizeof(RowSum) <= kPieceWords * kWordSize);
  static_assert(sizeof(RequestProgress) == kWordSize);

  int64_t* words_ = nullptr;
  int64_t* results_ = nullptr;
};

}  // namespace adaptive_spec
