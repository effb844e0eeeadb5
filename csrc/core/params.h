// What a launcher is given: pointers, strides in elements and sizes, all checked by the binding.
// The same structs go to the CPU launchers and, by value, to kernels.
#pragma once

#include <cstdint>

#include "macros.h"
#include "records.h"
#include "row_choice.h"
#include "sampling_walks.h"
#include "strided.h"
#include "walks.h"
#include "workspace.h"

namespace adaptive_spec {

// What a verify op reports about each request besides its tokens. Only accept_token_num is always
// there; each of the others saves the engine a launch of its own.
struct VerifyOutputs {
  Vector<int32_t> accept_token_num;  // [B] accepted drafts
  Vector<int32_t> accept_lens;       // [B] accepted drafts + 1
  Vector<int64_t> bonus_tokens;      // [B]
  Vector<const int64_t> seq_lens;    // [B] before the round
  Vector<int64_t> new_seq_lens;      // [B] seq_lens + accept_lens
  Vector<int64_t> select_index;      // [B] row of the last accepted token among the B * D verified
  Vector<int64_t> accepted_tokens;   // [>= B * (S + 1)] emitted tokens, packed in request order
  int64_t num_verified = 0;          // D: verified tokens of a request

  AS_HD void write(int64_t b, const WalkResult& walk) const {
    const int64_t n = walk.num_accepted;
    accept_token_num[b] = static_cast<int32_t>(n);
    if (accept_lens) accept_lens[b] = static_cast<int32_t>(n + 1);
    if (bonus_tokens) bonus_tokens[b] = walk.bonus;
    if (new_seq_lens) new_seq_lens[b] = seq_lens[b] + n + 1;
    if (select_index) select_index[b] = b * num_verified + n;
  }
};

// Rows that are not padding; a count that makes no sense is taken to the nearest one that does.
AS_HD int64_t num_live_rows(const int32_t* num_reqs, int64_t batch_size) {
  if (num_reqs == nullptr || *num_reqs >= batch_size) return batch_size;
  return *num_reqs < 0 ? 0 : *num_reqs;
}

// The adaptive state that a round reports to; `words` is null where the op runs without one.
struct AdaptiveTarget {
  int64_t* words = nullptr;
  int64_t* ring = nullptr;
  int64_t num_words = 0;
  int64_t num_ring_words = 0;
  int32_t slot = 0;
};

// The part common to all verify ops.
struct RoundParams {
  int64_t batch_size = 0;
  int64_t num_steps = 0;               // S
  const int32_t* num_reqs = nullptr;   // [1]
  Vector<const int32_t> max_accept{};  // [B]
  AdaptiveTarget adaptive{};
  VerifyOutputs outputs{};
  Workspace workspace{};  // only for launches of several blocks

  AS_HD int64_t accept_limit(int64_t b) const {
    if (!max_accept || max_accept[b] >= num_steps) return num_steps;
    return max_accept[b] < 0 ? 0 : max_accept[b];
  }
  // Whether anything is left to do when all requests have been verified.
  AS_HD bool has_finish() const { return adaptive.words != nullptr || outputs.accepted_tokens; }
  // Where the blocks of a launch add up what they did.
  AS_HD RoundTotals* totals() const {
    if (adaptive.words == nullptr) return workspace.totals();
    return &reinterpret_cast<StateHeader*>(adaptive.words)->pending;
  }
};

struct VerifyTreeParams {
  RoundParams round;
  TreeBatch tree;
};

struct VerifyChainParams {
  RoundParams round;
  Matrix<const int64_t> draft_tokens;    // [B, >= S]
  Matrix<const int64_t> target_predict;  // [B, >= S + 1]
  Matrix<int32_t> output_token_ids;      // [B, output_width]
  int64_t output_width = 0;
};

enum class LogitsType { kFloat16, kBFloat16, kFloat32, kFloat64 };

// A batch of rows of logits, V contiguous entries each.
struct LogitsRows {
  const void* data = nullptr;
  int64_t request_stride = 0;
  int64_t position_stride = 0;
  int64_t vocab_size = 0;
  LogitsType type = LogitsType::kFloat32;

  // T: the type that `type` says.
  template <typename T>
  AS_HD const T* row(int64_t b, int64_t i) const {
    return static_cast<const T*>(data) + b * request_stride + i * position_stride;
  }
};

struct VerifyChainLogitsParams {
  RoundParams round;
  Matrix<const int64_t> draft_tokens;  // [B, >= S]
  LogitsRows logits;                   // [B, >= S + 1, V]
  Matrix<int32_t> output_token_ids;    // [B, output_width]
  int64_t output_width = 0;
};

// Rows of logits whose choices are sampled, each with the noise of its position.
struct SampledLogits {
  LogitsRows rows;  // chains: [B, >= S + 1, V], trees: [B, D, V]
  SamplingRules rules;
  Vector<bool> error_mask;  // [B]; set for a request whose walk met a row that cannot be sampled
};

struct SampleChainLogitsParams {
  RoundParams round;
  Matrix<const int64_t> draft_tokens;  // [B, >= S]
  SampledLogits logits;
  Vector<const int64_t> positions;   // [B] of the first row; the others follow
  ProbabilityRows draft_probs;       // [B, >= S, V]; null: drafts are only compared with choices
  Matrix<int32_t> output_token_ids;  // [B, output_width]
  int64_t output_width = 0;
};

struct SampleTreeLogitsParams {
  RoundParams round;
  Trees tree;
  SampledLogits logits;
  Matrix<const int64_t> positions;  // [B, D]
};

struct SampleTreeParams {
  RoundParams round;
  SamplingTreeBatch tree;
};

struct SampleChainParams {
  RoundParams round;
  SamplingChainBatch chain;
  Matrix<int32_t> output_token_ids;  // [B, output_width]
  int64_t output_width = 0;
  // Counters that grow with every round, or absent: drafts accepted if each stood alone, and
  // drafts emitted.
  Vector<int32_t> accepted_alone;  // [B]
  Vector<int32_t> emitted_drafts;  // [B]
};

struct UpdateParams {
  Vector<const int32_t> accept_token_num;  // [B]
  int64_t batch_size = 0;
  int64_t num_steps = 0;
  const int32_t* num_reqs = nullptr;
  AdaptiveTarget adaptive{};
};

struct ChainTreeParams {
  Matrix<int64_t> retrive_index;  // [B, D]
  Matrix<int64_t> retrive_next_token;
  Matrix<int64_t> retrive_next_sibling;
  Vector<int64_t> positions;  // [>= B * D]
  Vector<const int64_t> seq_lens;
  int64_t batch_size = 0;
  int64_t num_nodes = 0;
  const int32_t* num_reqs = nullptr;
};

}  // namespace adaptive_spec
