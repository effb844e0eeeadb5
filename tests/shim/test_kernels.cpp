// The kernel bodies against the CPU launchers: outputs, untouched memory, adaptive state and ring
// are equal bit for bit, on random calls in random launch shapes and orders, and every counter is
// back at zero after every launch.
//
//   test_kernels fibers|threads FIRST_SEED NUM_CASES [OP, one of kOps below]
//
// `threads` runs small cases with a real thread per lane, for ThreadSanitizer. A case depends on
// its seed alone.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "../../csrc/cpu/launch.h"
#include "atomics.h"
#include "cases.h"
#include "cuda_shim.h"
#include "plan.h"
#include "rows.h"
#include "sample.cuh"
#include "sample_logits.cuh"
#include "update.cuh"
#include "verify.cuh"
#include "verify_logits.cuh"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#include <sanitizer/common_interface_defs.h>
#endif

using namespace kernel_cases;

namespace {

// What runs now, for whatever ends the process.
char current_case[200];

[[noreturn]] void fail(const std::string& problem) {
  std::fprintf(stderr, "%s: %s\n", current_case, problem.c_str());
  std::exit(1);
}

void print_current_case() {
  [[maybe_unused]] const auto size = write(STDERR_FILENO, current_case, std::strlen(current_case));
}

void name_the_case_on_death() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  __sanitizer_set_death_callback(print_current_case);
#else
  struct sigaction action{};
  action.sa_handler = [](int) {
    print_current_case();
    const char text[] = ": fault\n";
    [[maybe_unused]] const auto size = write(STDERR_FILENO, text, sizeof text - 1);
    _exit(1);
  };
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
#endif
}

class Case {
 public:
  Case(uint64_t seed, bool threads) : random_(seed), threads_(threads) {}

  Random& random() { return random_; }
  int64_t up_to(int64_t fibers, int64_t threads) {
    return random_.between(0, threads_ ? threads : fibers);
  }

  template <typename Shared, typename Body>
  void launch(const cuda::LaunchShape& shape, const Body& body) {
    const uint64_t seed = random_.one_in(10) ? 0 : random_.bits();
    cuda_shim::launch<Shared>(shape.num_blocks, shape.num_threads, {seed, threads_}, body);
  }
  // Mostly a shape that no launcher would choose.
  cuda::LaunchShape any_shape(const cuda::LaunchShape& usual) {
    if (!threads_ && random_.one_in(4)) return usual;
    return cuda::shape(random_.between(1, threads_ ? 3 : 6), any_num_threads());
  }
  int64_t any_num_threads() {
    const int64_t max_warps = threads_ ? 2 : random_.any_of<int64_t>({1, 2, 2, 3, 8});
    return 32 * random_.between(1, max_warps);
  }
  bool threads() const { return threads_; }

 private:
  Random random_;
  bool threads_;
};

struct Sizes {
  int64_t batch_size;
  int64_t num_steps;
};

// Calls whose rows are far apart are small: each element has a page of its own.
Sizes any_sizes(Case& test, bool is_huge, int64_t max_steps) {
  Random& random = test.random();
  if (is_huge) return {random.between(2, 3), random.between(0, 2)};
  const int64_t steps = random.one_in(4) ? max_steps : std::min<int64_t>(max_steps, 7);
  const int64_t many = random.one_in(4) ? 300 : 70;  // several for each thread of a block
  return {random.one_in(3) ? test.up_to(many, 6) : test.up_to(9, 3), test.up_to(steps, 3)};
}

// An op says: the sizes of a call, how it is made, which runs twice with equal
// arguments, and how it is launched on either side.
struct TreeOp {
  using Params = VerifyTreeParams;
  Sizes sizes;
  int64_t num_nodes;

  TreeOp(Case& test, bool is_huge) : sizes(any_sizes(test, is_huge, 20)) {
    Random& random = test.random();
    num_nodes = 1 + (is_huge ? random.below(3) : test.up_to(random.one_in(4) ? 69 : 12, 6));
  }
  Params make(Tensors& tensors, Random& random, const Traits& traits) const {
    return any_tree(tensors, random, traits, num_nodes);
  }
  static void on_cpu(const Params& params) { cpu::launch_verify_tree_greedy(params); }
  void on_device(Case& test, const Params& params, const cuda::LaunchShape& shape) const {
    test.launch<cuda::FinishShared>(
        shape, [&](cuda::FinishShared& shared) { cuda::verify_body(params, shared); });
  }
  cuda::LaunchShape shape(Case& test) const {
    return test.any_shape(cuda::verify_shape(sizes.batch_size));
  }
};

struct ChainOp {
  using Params = VerifyChainParams;
  Sizes sizes;

  ChainOp(Case& test, bool is_huge) : sizes(any_sizes(test, is_huge, 66)) {}
  Params make(Tensors& tensors, Random& random, const Traits& traits) const {
    return any_chain(tensors, random, traits);
  }
  static void on_cpu(const Params& params) { cpu::launch_verify_chain_greedy(params); }
  void on_device(Case& test, const Params& params, const cuda::LaunchShape& shape) const {
    test.launch<cuda::FinishShared>(
        shape, [&](cuda::FinishShared& shared) { cuda::verify_body(params, shared); });
  }
  cuda::LaunchShape shape(Case& test) const {
    return test.any_shape(cuda::verify_shape(sizes.batch_size));
  }
};

// How the ops that are given logits are launched, which is all they share with nobody else.
struct LogitsSizes {
  Sizes sizes;
  int64_t num_nodes;  // of a tree; 0: a chain
  LogitsType type;
  int64_t vocab_size;
  cuda::LogitsPlan plan;

  LogitsSizes(Case& test, bool is_huge, int64_t num_nodes) : num_nodes(num_nodes) {
    Random& random = test.random();
    type = random.any_of({LogitsType::kFloat16, LogitsType::kBFloat16, LogitsType::kFloat32});
    sizes = any_sizes(test, is_huge, 66);
    // All blocks of a launch are there at once, so not too many.
    const int64_t max_rows = test.threads() ? 6 : random.one_in(10) ? 80 : 16;
    if (sizes.batch_size * num_positions() > max_rows) {
      if (num_nodes > 0 || random.one_in(2)) {
        sizes.batch_size = max_rows / num_positions();
      } else {
        sizes.num_steps = std::max<int64_t>(max_rows / sizes.batch_size - 1, 0);
      }
    }
    vocab_size = 1 + (random.one_in(2)   ? random.below(40)
                      : random.one_in(5) ? test.up_to(5000, 400)
                                         : test.up_to(600, 200));
    const int64_t entry_size = type == LogitsType::kFloat32 ? 4 : 2;
    const int64_t num_rows = std::max<int64_t>(sizes.batch_size * num_positions(), 1);
    if (random.one_in(3)) {
      // As it would be on a device of a few multiprocessors.
      plan = cuda::logits_plan(sizes.batch_size, vocab_size, entry_size, random.between(1, 9));
    } else {
      const int64_t max_pieces = std::clamp<int64_t>(max_rows / num_rows, 1, 6);
      const int64_t unit = random.one_in(3) ? 1 : 16 / entry_size;
      const int64_t size = cuda::ceil_div(vocab_size, random.between(1, max_pieces));
      plan.piece_size = cuda::ceil_div(size, unit) * unit;
      plan.num_pieces = cuda::ceil_div(vocab_size, plan.piece_size);
    }
  }
  int64_t num_positions() const { return num_nodes > 0 ? num_nodes : sizes.num_steps + 1; }
  cuda::LaunchShape shape(Case& test) const {
    const int64_t num_blocks =
        std::max<int64_t>(sizes.batch_size * num_positions() * plan.num_pieces, 1);
    const bool is_usual = !test.threads() && num_blocks < 10 && test.random().one_in(5);
    const int64_t num_threads = is_usual ? cuda::kLogitsThreads : test.any_num_threads();
    // Each lane has a stack, which is two mappings, of which a process has 65530.
    constexpr int64_t kMaxLanes = 16384;
    const int64_t max_threads = std::max<int64_t>(kMaxLanes / 32 / num_blocks, 1) * 32;
    return cuda::shape(num_blocks, std::min(num_threads, max_threads));
  }
  // body<T>(shared), T: the type of the logits.
  template <typename Shared, typename Body>
  void launch(Case& test, const cuda::LaunchShape& shape, const Body& body) const {
    test.launch<Shared>(shape, [&](Shared& shared) {
      switch (type) {
        case LogitsType::kFloat16:
          return body.template operator()<Half>(shared);
        case LogitsType::kBFloat16:
          return body.template operator()<BFloat16>(shared);
        default:
          return body.template operator()<float>(shared);
      }
    });
  }
};

struct LogitsOp : LogitsSizes {
  using Params = VerifyChainLogitsParams;

  LogitsOp(Case& test, bool is_huge) : LogitsSizes(test, is_huge, 0) {}
  Params make(Tensors& tensors, Random& random, const Traits& traits) const {
    return any_chain_logits(tensors, random, traits, type, vocab_size);
  }
  static void on_cpu(const Params& params) { cpu::launch_verify_chain_greedy_from_logits(params); }
  void on_device(Case& test, const Params& params, const cuda::LaunchShape& shape) const {
    launch<cuda::LogitsShared>(test, shape, [&]<typename T>(cuda::LogitsShared& shared) {
      cuda::verify_logits_body<T>(params, plan, shared);
    });
  }
};

struct SampledLogitsOp : LogitsSizes {
  using LogitsSizes::LogitsSizes;

  template <typename Params>
  void on_device(Case& test, const Params& params, const cuda::LaunchShape& shape) const {
    launch<cuda::SampleLogitsShared>(test, shape,
                                     [&]<typename T>(cuda::SampleLogitsShared& shared) {
                                       cuda::sample_logits_body<T>(params, plan, shared);
                                     });
  }
};

struct SampledChainLogitsOp : SampledLogitsOp {
  using Params = SampleChainLogitsParams;

  SampledChainLogitsOp(Case& test, bool is_huge) : SampledLogitsOp(test, is_huge, 0) {}
  Params make(Tensors& tensors, Random& random, const Traits& traits) const {
    return any_sampled_chain_logits(tensors, random, traits, type, vocab_size);
  }
  static void on_cpu(const Params& params) { cpu::launch_chain_sampling_from_logits(params); }
};

struct SampledTreeLogitsOp : SampledLogitsOp {
  using Params = SampleTreeLogitsParams;

  SampledTreeLogitsOp(Case& test, bool is_huge)
      : SampledLogitsOp(test, is_huge, 1 + (is_huge ? test.random().below(3) : test.up_to(15, 5))) {
  }
  Params make(Tensors& tensors, Random& random, const Traits& traits) const {
    return any_sampled_tree_logits(tensors, random, traits, type, num_nodes, vocab_size);
  }
  static void on_cpu(const Params& params) { cpu::launch_tree_sampling_from_logits(params); }
};

// How the two ops that sample from probabilities are launched, which is all they share with nobody
// else.
struct SampledOp {
  Sizes sizes;
  int64_t vocab_size;
  cuda::LogitsPlan plan;

  SampledOp(Case& test, bool is_huge) : sizes(any_sizes(test, is_huge, 20)) {
    Random& random = test.random();
    sizes.batch_size = std::min<int64_t>(sizes.batch_size, test.threads() ? 3 : 12);
    vocab_size = 1 + (random.one_in(2) ? random.below(40) : test.up_to(700, 150));
    const bool has_many = !test.threads() && sizes.batch_size < 3 && random.one_in(4);
    const int64_t max_pieces = has_many ? 70 : 3;
    plan.piece_size = cuda::ceil_div(vocab_size, random.between(1, max_pieces));
    plan.num_pieces = cuda::ceil_div(vocab_size, plan.piece_size);
  }
  template <typename Params>
  void on_device(Case& test, const Params& params, const cuda::LaunchShape& shape) const {
    test.launch<cuda::SampleShared>(
        shape, [&](cuda::SampleShared& shared) { cuda::sample_body(params, plan, shared); });
  }
  cuda::LaunchShape shape(Case& test) const {
    const int64_t num_blocks = std::max<int64_t>(sizes.batch_size * plan.num_pieces, 1);
    return cuda::shape(num_blocks, std::min<int64_t>(test.any_num_threads(), 96));
  }
};

struct SampledTreeOp : SampledOp {
  using Params = SampleTreeParams;
  int64_t num_nodes;

  SampledTreeOp(Case& test, bool is_huge) : SampledOp(test, is_huge) {
    Random& random = test.random();
    num_nodes = 1 + (is_huge ? random.below(3) : test.up_to(random.one_in(8) ? 69 : 12, 6));
  }
  Params make(Tensors& tensors, Random& random, const Traits& traits) const {
    return any_sampled_tree(tensors, random, traits, num_nodes, vocab_size);
  }
  static void on_cpu(const Params& params) { cpu::launch_tree_speculative_sampling(params); }
};

struct SampledChainOp : SampledOp {
  using Params = SampleChainParams;
  using SampledOp::SampledOp;

  Params make(Tensors& tensors, Random& random, const Traits& traits) const {
    return any_sampled_chain(tensors, random, traits, vocab_size);
  }
  static void on_cpu(const Params& params) { cpu::launch_chain_speculative_sampling(params); }
};

struct UpdateOp {
  using Params = UpdateParams;
  Sizes sizes;

  UpdateOp(Case& test, bool is_huge) : sizes(any_sizes(test, is_huge, 64)) {}
  Params make(Tensors& tensors, Random& random, const Traits& traits) const {
    return any_update(tensors, random, traits);
  }
  static void on_cpu(const Params& params) { cpu::launch_update_and_select(params); }
  void on_device(Case& test, const Params& params, const cuda::LaunchShape& shape) const {
    test.launch<cuda::FinishShared>(
        shape, [&](cuda::FinishShared& shared) { cuda::update_body(params, shared); });
  }
  cuda::LaunchShape shape(Case& test) const {
    if (test.random().one_in(2)) return cuda::update_shape(sizes.batch_size);
    return cuda::shape(1, test.any_num_threads());
  }
};

struct ChainTreeOp {
  using Params = ChainTreeParams;
  Sizes sizes;

  ChainTreeOp(Case& test, bool is_huge) : sizes(any_sizes(test, is_huge, 66)) {}
  Params make(Tensors& tensors, Random& random, const Traits& traits) const {
    return any_chain_tree(tensors, random, traits, sizes.num_steps + 1);
  }
  static void on_cpu(const Params& params) { cpu::launch_build_chain_tree(params); }
  void on_device(Case& test, const Params& params, const cuda::LaunchShape& shape) const {
    struct Nothing {};
    test.launch<Nothing>(shape, [&](Nothing&) { cuda::chain_tree_body(params); });
  }
  cuda::LaunchShape shape(Case& test) const {
    return test.any_shape(cuda::chain_tree_shape(sizes.batch_size, sizes.num_steps + 1));
  }
};

template <typename Params>
AdaptiveTarget* adaptive_of(Params& params) {
  if constexpr (requires { params.round; }) {
    return &params.round.adaptive;
  } else if constexpr (requires { params.adaptive; }) {
    return &params.adaptive;
  } else {
    return nullptr;
  }
}

// A few launches one after the other, on the same state and workspace, as replays of graphs are.
template <typename Op>
class Replays {
 public:
  explicit Replays(Case& test) : test_(test) {
    if (test.random().one_in(2)) cpu_state_ = device_state_ = State(test.random());
  }

  void run() {
    const int64_t num_launches = test_.random().between(1, 3);
    for (int64_t i = 0; i < num_launches; ++i) launch();
  }

 private:
  using Params = typename Op::Params;

  void launch() {
    Random& random = test_.random();
    const Layout layout{random.bits(), random.one_in(2), random.one_in(12)};
    Op op(test_, layout.is_huge);
    AdaptiveTarget cpu_target, device_target;
    // A tensor that is no state, or a slot that it does not have, is left as it is.
    const bool is_spoilt = random.one_in(30);
    if (cpu_state_) {
      const auto slot =
          static_cast<int32_t>(random.below(cpu_state_->num_slots() + random.one_in(30)));
      cpu_target = cpu_state_->target(slot);
      device_target = device_state_->target(slot);
      if (is_usable(cpu_target) && random.one_in(2)) use_slot_steps(op, slot);
      if (is_spoilt) spoil_states();
    }
    const auto shape = op.shape(test_);

    const int64_t batch_size = op.sizes.batch_size;
    const auto num_reqs = static_cast<int32_t>(random.between(-2, batch_size + 2));
    Traits traits{batch_size, op.sizes.num_steps, 0, &num_reqs, random.one_in(3)};
    if (random.one_in(3)) traits.num_reqs = nullptr;
    traits.num_live = num_live_rows(traits.num_reqs, batch_size);

    Tensors cpu_tensors(layout), device_tensors(layout);
    const uint64_t values = random.bits();
    Random cpu_values(values), device_values(values);
    Params cpu_params = op.make(cpu_tensors, cpu_values, traits);
    Params device_params = op.make(device_tensors, device_values, traits);
    if (!device_tensors.difference(cpu_tensors).empty()) fail("the two calls are not the same");
    if (AdaptiveTarget* target = adaptive_of(cpu_params)) *target = cpu_target;
    if (AdaptiveTarget* target = adaptive_of(device_params)) *target = device_target;
    if constexpr (requires { device_params.round; }) {
      device_params.round.workspace = workspace(device_params, shape);
      if (cpu_state_ && !is_usable(cpu_target)) {
        // Then no block is the last of several, and the tokens stay where they are.
        cpu_params.round.outputs.accepted_tokens = {};
        device_params.round.outputs.accepted_tokens = {};
      }
    }

    cpu_tensors.forbid_padding(true);
    device_tensors.forbid_padding(true);
    op.on_cpu(cpu_params);
    op.on_device(test_, device_params, shape);
    cpu_tensors.forbid_padding(false);
    device_tensors.forbid_padding(false);

    const std::string different = device_tensors.difference(cpu_tensors);
    if (!different.empty()) fail("`" + different + "` differs from the CPU op's");
    // The pending sums and the ticket are part of the state, and zero on the CPU.
    if (device_state_ != cpu_state_) fail("the state or the ring differs from the CPU op's");
    const auto counters_end =
        workspace_.begin() + static_cast<std::ptrdiff_t>(workspace_.size() / 4);
    if (std::any_of(workspace_.begin(), counters_end, [](int64_t word) { return word != 0; })) {
      fail("a counter of the workspace is not back at zero");
    }
    if (cpu_state_ && is_spoilt) spoil_states();
  }

  void spoil_states() {
    cpu_state_->spoil();
    device_state_->spoil();
  }

  // Else nearly every sample would be stale.
  void use_slot_steps(Op& op, int32_t slot) {
    const int32_t steps = cpu_state_->steps(slot);
    if (steps <= op.sizes.num_steps) op.sizes.num_steps = steps;
  }

  Workspace workspace(const Params& params, const cuda::LaunchShape& shape) {
    const RoundParams& round = params.round;
    int64_t num_positions = 0;
    if constexpr (std::is_base_of_v<LogitsSizes, Op>) {
      num_positions = max_rows(params);
    } else if constexpr (std::is_base_of_v<SampledOp, Op>) {
      num_positions = round.num_steps + 1;
    }
    const bool only_totals = num_positions == 0;
    if (only_totals && (round.adaptive.words != nullptr || shape.num_blocks == 1)) return {};
    const int64_t num_words = Workspace::num_words(round.batch_size, num_positions);
    if (num_words > static_cast<int64_t>(workspace_.size())) {
      workspace_.assign(static_cast<size_t>(num_words), 0);
      workspace_.shrink_to_fit();
      std::fill(workspace_.begin() + num_words / 4, workspace_.end(), int64_t{0x4DB3B3B3B3B3B3B3});
    }
    return Workspace(workspace_.data(), static_cast<int64_t>(workspace_.size()));
  }

  Case& test_;
  std::optional<State> cpu_state_, device_state_;
  std::vector<int64_t> workspace_;
};

using Run = void (*)(Case&);
constexpr std::pair<const char*, Run> kOps[] = {
    {"logits", [](Case& test) { Replays<LogitsOp>(test).run(); }},
    {"tree", [](Case& test) { Replays<TreeOp>(test).run(); }},
    {"logits", [](Case& test) { Replays<LogitsOp>(test).run(); }},
    {"chain", [](Case& test) { Replays<ChainOp>(test).run(); }},
    {"update", [](Case& test) { Replays<UpdateOp>(test).run(); }},
    {"sampled_tree", [](Case& test) { Replays<SampledTreeOp>(test).run(); }},
    {"sampled_chain", [](Case& test) { Replays<SampledChainOp>(test).run(); }},
    {"sampled_chain_logits", [](Case& test) { Replays<SampledChainLogitsOp>(test).run(); }},
    {"sampled_tree_logits", [](Case& test) { Replays<SampledTreeLogitsOp>(test).run(); }},
    {"chain_tree", [](Case& test) { Replays<ChainTreeOp>(test).run(); }},
};

}  // namespace

int main(int argc, char** argv) {
  const std::string engine = argc > 1 ? argv[1] : "";
  if (argc < 4 || (engine != "fibers" && engine != "threads")) {
    std::fprintf(stderr, "usage: %s fibers|threads FIRST_SEED NUM_CASES [OP]\n", argv[0]);
    return 2;
  }
  const uint64_t first = std::strtoull(argv[2], nullptr, 10);
  const uint64_t num_cases = std::strtoull(argv[3], nullptr, 10);
  name_the_case_on_death();
  uint64_t num_run = 0;
  for (uint64_t seed = first; num_run < num_cases; ++seed) {
    const auto& [name, run] = kOps[seed % std::size(kOps)];
    if (argc > 4 && std::string(argv[4]) != name) continue;
    std::snprintf(current_case, sizeof current_case, "%s %s %llu 1 (%s)", argv[0], engine.c_str(),
                  static_cast<unsigned long long>(seed), name);
    Case test(seed, engine == "threads");
    try {
      run(test);
    } catch (const cuda_shim::Error& error) {
      fail(error.what());
    }
    ++num_run;
  }
  std::printf("%llu cases equal\n", static_cast<unsigned long long>(num_run));
}
