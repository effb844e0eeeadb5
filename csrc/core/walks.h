// Greedy verification of one request: how many of its draft tokens the target model would have
// produced itself. Semantics, also for inputs that no correct caller sends, are in
// docs/semantics.md.
//
// On any input a walk ends, reads and writes only inside the tensors, and emits at least one token.
// A draft is accepted only when it is a token id and equals the target's choice; anything malformed
// on the path that was walked (a draft or target token that is no token id, a tree link that leads
// nowhere) is counted as an anomaly.
#pragma once

#include <cstdint>
#include <utility>

#include "argmax.h"
#include "group.h"
#include "macros.h"
#include "strided.h"

namespace adaptive_spec {

// Token ids leave through int32 tensors, so no vocabulary is larger than this.
constexpr int64_t kMaxVocabSize = int64_t{1} << 31;
// Emitted where the target's choice is no token id.
constexpr int64_t kFallbackToken = 0;

struct WalkResult {
  int64_t num_accepted = 0;  // drafts, bonus token excluded
  int64_t bonus = kFallbackToken;
  int64_t num_anomalies = 0;
};

// The target's choice after some prefix. Without a valid one the walk emits the fallback and ends.
struct TargetToken {
  int64_t id;
  bool is_valid;
  bool is_anomaly;
};

AS_HD TargetToken target_token(int64_t id) {
  const bool is_valid = id >= 0 && id < kMaxVocabSize;
  return {is_valid ? id : kFallbackToken, is_valid, !is_valid};
}

// The choice that a row of logits makes.
template <typename T>
AS_HD TargetToken target_token(const Argmax<T>& best) {
  return {best.index, best.is_usable(), best.has_nan || !best.is_usable()};
}

// Whether a chain goes on behind this draft.
AS_HD bool is_accepted(const TargetToken& wanted, int64_t draft) {
  return wanted.is_valid && draft == wanted.id;
}

// A chain: draft i follows draft i - 1, and target(i) is the target's choice given drafts 0..i-1.
// `target` is called by all lanes, for i = 0, 1, ... and no further than the first mismatch.
// `output` gets the accepted drafts, the bonus token, then -1 up to `output_width`.
template <typename Group, typename Target>
AS_HD WalkResult walk_chain_greedy(const Group& group, Vector<const int64_t> draft_tokens,
                                   int64_t num_steps, int64_t vocab_size, const Target& target,
                                   Vector<int32_t> output, int64_t output_width) {
  const auto drafts = group.load(draft_tokens, num_steps);
  WalkResult result;
  while (true) {
    const TargetToken wanted = target(result.num_accepted);
    result.bonus = wanted.id;
    result.num_anomalies += wanted.is_anomaly;
    if (group.rank() == 0) output[result.num_accepted] = static_cast<int32_t>(wanted.id);
    if (!wanted.is_valid || result.num_accepted == num_steps) break;
    const int64_t draft = drafts[result.num_accepted];
    if (draft < 0 || draft >= vocab_size) ++result.num_anomalies;
    if (!is_accepted(wanted, draft)) break;
    ++result.num_accepted;
  }
  for (int64_t i = result.num_accepted + 1 + group.rank(); i < output_width; i += group.size()) {
    output[i] = -1;
  }
  return result;
}

// A batch of trees, B requests of D nodes; node 0 is the last committed token. A node's *flat id*,
// retrive_index[b][i], is its place in predicts and, read row by row, in target_predict; it is
// b * D + i unless the caller laid the batch out otherwise.
struct Trees {
  Vector<int32_t> predicts;                  // [num_live * D]
  Matrix<int32_t> accept_index;              // [B, >= num_steps + 1]
  Matrix<const int64_t> candidates;          // [B, D] token ids
  Matrix<const int64_t> retrive_index;       // [B, D]
  Matrix<const int64_t> retrive_next_token;  // [B, D] first child, -1: none
  Matrix<const int64_t> retrive_next_sibling;
  int64_t num_nodes = 0;  // D
};

struct TreeBatch : Trees {
  Matrix<const int64_t> target_predict;
};

// One request's tree, as all lanes of a group walk through it.
template <typename Group>
class Tree {
 public:
  // num_live: requests that are not padding; the ids of the others are none.
  AS_HD Tree(const Group& group, const Trees& trees, int64_t num_live, int64_t b)
      : candidates_(group.load(trees.candidates.row(b), trees.num_nodes)),
        flat_ids_(group.load(trees.retrive_index.row(b), trees.num_nodes)),
        next_token_(group.load(trees.retrive_next_token.row(b), trees.num_nodes)),
        next_sibling_(group.load(trees.retrive_next_sibling.row(b), trees.num_nodes)),
        num_nodes_(trees.num_nodes),
        num_ids_(num_live * trees.num_nodes),
        first_id_(b * trees.num_nodes) {}

  AS_HD int64_t first_id() const { return first_id_; }
  AS_HD int64_t flat_id(int64_t node) const { return flat_ids_[node]; }
  AS_HD int64_t token(int64_t node) const { return candidates_[node]; }
  AS_HD bool is_flat_id(int64_t id) const { return id >= 0 && id < num_ids_; }

  AS_HD int64_t root_id(int64_t& num_anomalies) const {
    const int64_t id = flat_ids_[0];
    if (is_flat_id(id)) return id;
    ++num_anomalies;
    return first_id_;
  }

  // The first child of `node`, in list order, that accepts(token, has_id) takes; -1 if none
  // does. A child without a flat id cannot be taken.
  template <typename Accepts>
  AS_HD int64_t find_child(int64_t node, int64_t& num_anomalies, const Accepts& accepts) const {
    // -1 ends a list; any other link out of the tree ends it too, but should not be there.
    const auto follow = [&](int64_t link) -> int64_t {
      if (link >= 0 && link < num_nodes_) return link;
      num_anomalies += link != -1;
      return -1;
    };
    int64_t child = follow(next_token_[node]);
    for (int64_t seen = 0; child != -1; ++seen) {
      // A list of siblings has at most num_nodes members; one that goes on is a cycle.
      if (seen == num_nodes_) {
        ++num_anomalies;
        return -1;
      }
      if (accepts(candidates_[child], is_flat_id(flat_ids_[child]))) return child;
      child = follow(next_sibling_[child]);
    }
    return -1;
  }

 private:
  using Row = decltype(std::declval<Group>().load(std::declval<Vector<const int64_t>>(), 0));
  Row candidates_, flat_ids_, next_token_, next_sibling_;
  int64_t num_nodes_, num_ids_, first_id_;
};

// target(node, flat_id): the target's choice behind a node, asked for by all lanes, for the nodes
// of the accepted path. Writes accept_index[b][0..num_accepted] and the predicts of those nodes,
// nothing else.
template <typename Group, typename Target>
AS_HD WalkResult walk_tree(const Group& group, const Trees& trees, const Tree<Group>& tree,
                           int64_t b, int64_t num_steps, const Target& target) {
  const auto accept_index = trees.accept_index.row(b);
  WalkResult result;
  int64_t node = 0;
  int64_t last = tree.root_id(result.num_anomalies);
  TargetToken wanted;
  while (true) {
    if (group.rank() == 0) accept_index[result.num_accepted] = static_cast<int32_t>(last);
    wanted = target(node, last);
    result.num_anomalies += wanted.is_anomaly;
    if (group.rank() == 0) trees.predicts[last] = static_cast<int32_t>(wanted.id);
    if (!wanted.is_valid || result.num_accepted == num_steps) break;

    node = tree.find_child(node, result.num_anomalies, [&](int64_t token, bool has_id) {
      if (token == wanted.id && has_id) return true;
      const bool is_token = token >= 0 && token < kMaxVocabSize;
      result.num_anomalies += !is_token || token == wanted.id;
      return false;
    });
    if (node == -1) break;
    last = tree.flat_id(node);
    ++result.num_accepted;
  }
  result.bonus = wanted.id;
  return result;
}

template <typename Group>
AS_HD WalkResult walk_tree_greedy(const Group& group, const TreeBatch& batch, int64_t num_live,
                                  int64_t b, int64_t num_steps) {
  const int64_t num_nodes = batch.num_nodes;
  const Tree<Group> tree(group, batch, num_live, b);
  const auto own_targets = group.load(batch.target_predict.row(b), num_nodes);
  return walk_tree(group, batch, tree, b, num_steps, [&](int64_t /*node*/, int64_t flat_id) {
    const int64_t own = flat_id - tree.first_id();
    if (own >= 0 && own < num_nodes) return target_token(own_targets[own]);
    return target_token(batch.target_predict.at(flat_id / num_nodes, flat_id % num_nodes));
  });
}

}  // namespace adaptive_spec
