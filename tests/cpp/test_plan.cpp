// Launch shapes and workspace: for any size, the pieces cover each row exactly once, and what a
// launch uses of a workspace made for larger sizes stays in its own part of it.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "plan.h"
#include "workspace.h"

using namespace adaptive_spec;
using namespace adaptive_spec::cuda;

namespace {

std::mt19937_64 rng(3);

int64_t between(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

// Sizes of all magnitudes rather than mostly large ones.
int64_t any_up_to(int64_t high) { return between(1, std::min(high, int64_t{1} << between(0, 31))); }

void test_pieces_cover_the_vocabulary() {
  for (int trial = 0; trial < 100000; ++trial) {
    const int64_t batch_size = any_up_to(4096);
    const int64_t vocab_size = any_up_to(kMaxVocabSize);
    const int64_t entry_size = trial % 2 ? 2 : 4;
    const LogitsPlan plan = logits_plan(batch_size, vocab_size, entry_size, between(1, 200));
    CHECK(plan.num_pieces >= 1 && plan.piece_size >= 1);
    CHECK((plan.num_pieces - 1) * plan.piece_size < vocab_size);
    CHECK(plan.num_pieces * plan.piece_size >= vocab_size);
    CHECK(plan.piece_size * entry_size % 16 == 0);
    CHECK(plan.num_pieces * batch_size <= std::max(batch_size, kMaxWavePieces));
  }
}

void test_a_workspace_serves_all_smaller_launches() {
  for (int trial = 0; trial < 20000; ++trial) {
    const int64_t max_batch = any_up_to(4096);
    const int64_t max_positions = any_up_to(65);
    const int64_t num_words = Workspace::num_words(max_batch, max_positions);
    // Never touched: only addresses are compared.
    int64_t* const words = reinterpret_cast<int64_t*>(uintptr_t{1} << 40);
    const Workspace workspace(words, num_words);

    const int64_t batch_size = between(1, max_batch);
    const int64_t num_positions = between(1, max_positions);
    CHECK(Workspace::num_words(batch_size, num_positions) <= num_words);
    const int64_t num_rows = batch_size * num_positions;
    const int64_t num_pieces = logits_plan(batch_size, any_up_to(1 << 20), 2, 132).num_pieces;

    const auto at = [&](const void* p) {
      return reinterpret_cast<intptr_t>(p) - reinterpret_cast<intptr_t>(words);
    };
    struct Piece {
      int64_t words[6];  // the most there can be
    };
    // Counters in the first quarter, one after the other, results in the rest.
    const int64_t border = num_words / 4 * kWordSize;
    CHECK(at(workspace.totals()) == 0);
    CHECK(at(workspace.request(0)) >= static_cast<int64_t>(sizeof(RoundTotals)));
    CHECK(at(workspace.request(batch_size)) <= at(workspace.row_ticket(batch_size, 0)));
    CHECK(at(workspace.row_ticket(batch_size, num_rows)) <= border);
    CHECK(at(workspace.choice(0)) >= border);
    CHECK(at(workspace.choice(num_rows)) <= at(workspace.partials<Piece>(num_rows, 0, num_pieces)));
    CHECK(at(workspace.partials<Piece>(num_rows, num_rows, num_pieces)) <= num_words * kWordSize);
  }
}

void test_choices_survive_packing() {
  for (int64_t id : {int64_t{0}, int64_t{1}, int64_t{31999}, kMaxVocabSize - 1}) {
    for (int flags = 0; flags < 4; ++flags) {
      const TargetToken choice =
          unpack_choice(pack_choice({id, (flags & 1) != 0, (flags & 2) != 0}));
      CHECK(choice.id == id && choice.is_valid == ((flags & 1) != 0));
      CHECK(choice.is_anomaly == ((flags & 2) != 0));
    }
  }
}

void test_verify_shapes_have_a_warp_for_somebody() {
  for (int64_t batch_size = 0; batch_size <= 5000; ++batch_size) {
    const LaunchShape shape = verify_shape(batch_size);
    CHECK(shape.num_blocks >= 1 && shape.num_threads >= 32 && shape.num_threads % 32 == 0);
    // No block without a request, but for the one that closes an empty round.
    CHECK((shape.num_blocks - 1) * (shape.num_threads / 32) < std::max<int64_t>(batch_size, 1));
    CHECK(update_shape(batch_size).num_threads <= 1024);
  }
}

}  // namespace

int main() {
  test_pieces_cover_the_vocabulary();
  test_a_workspace_serves_all_smaller_launches();
  test_choices_survive_packing();
  test_verify_shapes_have_a_warp_for_somebody();
}
