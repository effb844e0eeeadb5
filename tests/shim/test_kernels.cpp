// The CUDA kernel bodies against the CPU launchers, bit for bit: outputs, untouched memory,
// adaptive state and ring, on random calls in random launch shapes and orders.
//
//   test_kernels NUM_CASES [threads]
//
// `threads` runs small cases with a real thread per lane, for ThreadSanitizer.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "../cpp/check.h"
#include "../cpu/launch.h"
#include "cases.h"
#include "cuda_shim.h"
#include "plan.h"
#include "update.cuh"
#include "verify.cuh"
#include "verify_logits.cuh"

using namespace adaptive_spec;
using namespace cases;

namespace {

bool use_threads = false;

cuda_shim::Options engine(Random& random) {
  return {random.one_in(10) ? 0 : random.bits(), use_threads};
}

cuda::LaunchShape any_shape(Random& random, const cuda::LaunchShape& usual) {
  if (!use_threads && random.one_in(4)) return usual;
  const int64_t max_warps = use_threads ? 2 : 4;
  return cuda::shape(random.between(1, use_threads ? 3 : 4), 32 * random.between(1, max_warps));
}

void launch_cpu(const VerifyTreeParams& params) { cpu::launch_verify_tree_greedy(params); }
void launch_cpu(const VerifyChainParams& params) { cpu::launch_verify_chain_greedy(params); }
void launch_cpu(const VerifyChainLogitsParams& params) {
  cpu::launch_verify_chain_greedy_from_logits(params);
}
void launch_cpu(const UpdateParams& params) { cpu::launch_update_and_select(params); }
void launch_cpu(const ChainTreeParams& params) { cpu::launch_build_chain_tree(params); }

template <typename Params>
void launch_verify(const Params& params, Random& random) {
  const cuda::LaunchShape shape = any_shape(random, cuda::verify_shape(params.round.batch_size));
  cuda_shim::launch<cuda::FinishShared>(
      shape.num_blocks, shape.num_threads, engine(random),
      [&](cuda::FinishShared& shared) { cuda::verify_body(params, shared); });
}
void launch_kernel(const VerifyTreeParams& params, Random& random) {
  launch_verify(params, random);
}
void launch_kernel(const VerifyChainParams& params, Random& random) {
  launch_verify(params, random);
}

template <typename T>
void launch_logits(const VerifyChainLogitsParams& params, Random& random) {
  const RoundParams& round = params.round;
  const int64_t num_rows = round.batch_size * (round.num_steps + 1);
  // Any number of pieces that the workspace holds and that is not too slow to run here.
  const int64_t unit = 16 / static_cast<int64_t>(sizeof(T));
  const int64_t max_pieces = std::clamp<int64_t>(40 / std::max<int64_t>(num_rows, 1), 1, 5);
  const int64_t size =
      cuda::ceil_div(cuda::ceil_div(params.vocab_size, random.between(1, max_pieces)), unit) * unit;
  const cuda::LogitsPlan plan{cuda::ceil_div(params.vocab_size, size), size};
  const unsigned num_threads = static_cast<unsigned>(32 * random.between(1, use_threads ? 2 : 3));
  cuda_shim::launch<cuda::LogitsShared>(
      static_cast<unsigned>(std::max<int64_t>(num_rows * plan.num_pieces, 1)), num_threads,
      engine(random),
      [&](cuda::LogitsShared& shared) { cuda::verify_logits_body<T>(params, plan, shared); });
}
void launch_kernel(const VerifyChainLogitsParams& params, Random& random) {
  switch (params.logits_type) {
    case LogitsType::kFloat16:
      return launch_logits<Half>(params, random);
    case LogitsType::kBFloat16:
      return launch_logits<BFloat16>(params, random);
    default:
      return launch_logits<float>(params, random);
  }
}

void launch_kernel(const UpdateParams& params, Random& random) {
  const unsigned num_threads = static_cast<unsigned>(32 * random.between(1, 3));
  cuda_shim::launch<cuda::FinishShared>(
      1, num_threads, engine(random),
      [&](cuda::FinishShared& shared) { cuda::update_body(params, shared); });
}
void launch_kernel(const ChainTreeParams& params, Random& random) {
  struct Nothing {};
  const cuda::LaunchShape shape = any_shape(random, {2, 64});
  cuda_shim::launch<Nothing>(shape.num_blocks, shape.num_threads, engine(random),
                             [&](Nothing&) { cuda::chain_tree_body(params); });
}

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

// A few launches one after the other on the same state and workspace, as replays of a graph are.
template <typename Generate>
void run_case(uint64_t seed, const char* op, const Generate& generate) {
  Random random(seed);
  std::optional<State> on_cpu, on_device;
  if (random.one_in(2) || std::strcmp(op, "update") == 0) on_cpu = on_device = State(random);
  // One workspace for launches of any size.
  constexpr int64_t kMaxBatch = 300, kMaxPositions = 70;
  static std::vector<int64_t> workspace(Workspace::num_words(kMaxBatch, kMaxPositions));

  const int64_t num_launches = random.between(1, 3);
  for (int64_t launch = 0; launch < num_launches; ++launch) {
    Memory cpu_memory, device_memory;
    const uint64_t layout = random.bits();
    Random cpu_random(layout), device_random(layout);
    Builder cpu_build(cpu_memory, cpu_random), device_build(device_memory, device_random);
    auto cpu_params = generate(cpu_build);
    auto device_params = generate(device_build);
    CHECK(device_memory.first_difference(cpu_memory) == -1);
    if (on_cpu && adaptive_of(cpu_params) != nullptr) {
      const int32_t slot = static_cast<int32_t>(random.below(on_cpu->num_slots()));
      *adaptive_of(cpu_params) = on_cpu->target(slot);
      *adaptive_of(device_params) = on_device->target(slot);
    }
    if constexpr (requires { device_params.round; }) {
      device_params.round.workspace =
          Workspace(workspace.data(), static_cast<int64_t>(workspace.size()));
    }
    launch_cpu(cpu_params);
    launch_kernel(device_params, random);

    const int different = device_memory.first_difference(cpu_memory);
    const bool states_differ = on_cpu != on_device;
    const bool is_reset = std::all_of(workspace.begin(), workspace.begin() + workspace.size() / 4,
                                      [](int64_t word) { return word == 0; });
    if (different != -1 || states_differ || !is_reset) {
      std::fprintf(stderr, "%s, seed %llu, launch %lld: %s (tensor %d)\n", op,
                   static_cast<unsigned long long>(seed), static_cast<long long>(launch),
                   different != -1 ? "outputs differ"
                   : states_differ ? "states differ"
                                   : "counters are not back at zero",
                   different);
      std::exit(1);
    }
  }
}

void run_any_case(uint64_t seed) {
  const int64_t max_batch = use_threads ? 6 : 300;
  const auto sized = [&](const auto& make, int64_t batch, int64_t steps) {
    return [make, batch, steps](Builder& build) {
      return make(build, any_sizes(build.random(), batch, steps));
    };
  };
  switch (seed % 5) {
    case 0:
      return run_case(seed, "tree", sized(any_tree, max_batch, 20));
    case 1:
      return run_case(seed, "chain", sized(any_chain, max_batch, 66));
    case 2:
      return run_case(seed, "logits",
                      sized(
                          [](Builder& build, const Sizes& sizes) {
                            return any_chain_logits(build, sizes, use_threads ? 300 : 5000);
                          },
                          use_threads ? 3 : 6, 5));
    case 3:
      return run_case(seed, "update", sized(any_update, max_batch, 64));
    default:
      return run_case(seed, "chain tree", sized(any_chain_tree, max_batch, 66));
  }
}

// Rows gigabytes apart, in address space of which only the touched pages exist. An offset that was
// computed in 32 bits would hit another row, or nothing.
void test_offsets_beyond_32_bits() {
  constexpr int64_t kStride = (int64_t{1} << 31) + 4097;  // elements
  constexpr int64_t kRows = 4, kVocab = 100, kSteps = 1;
  constexpr size_t kBytes = (kRows * kStride + kVocab) * sizeof(uint16_t);
  void* space = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(space != MAP_FAILED);
  uint16_t* logits = static_cast<uint16_t*>(space);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t k = 0; k < kVocab; ++k) logits[row * kStride + k] = 0x3c00;
    logits[row * kStride + 10 + row] = 0x4000;
  }
  for (const auto& [request_stride, position_stride] :
       {std::pair{2 * kStride, kStride}, std::pair{kStride, 2 * kStride}}) {
    const int64_t drafts[] = {10, 10};
    int32_t tokens[4], counts[2];
    std::vector<int64_t> workspace(Workspace::num_words(2, 2));
    VerifyChainLogitsParams params;
    params.round.batch_size = 2;
    params.round.num_steps = kSteps;
    params.round.outputs.accept_token_num = {counts};
    params.round.workspace = Workspace(workspace.data(), static_cast<int64_t>(workspace.size()));
    params.draft_tokens = {drafts, 1, 1};
    params.target_logits = logits;
    params.request_stride = request_stride;
    params.position_stride = position_stride;
    params.vocab_size = kVocab;
    params.logits_type = LogitsType::kBFloat16;
    params.output_token_ids = {tokens, 2, 1};
    params.output_width = 2;
    Random random(5);
    launch_kernel(params, random);
    const int32_t second = 10 + static_cast<int32_t>(position_stride / kStride);
    const int32_t other = 10 + static_cast<int32_t>(request_stride / kStride);
    CHECK(tokens[0] == 10 && tokens[1] == second && counts[0] == 1);
    CHECK(tokens[2] == other && tokens[3] == -1 && counts[1] == 0);
  }
  munmap(space, kBytes);
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t num_cases = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  use_threads = argc > 2 && std::strcmp(argv[2], "threads") == 0;
  if (!use_threads) test_offsets_beyond_32_bits();
  for (uint64_t seed = 1; seed <= num_cases; ++seed) run_any_case(seed);
  std::printf("%llu cases equal\n", static_cast<unsigned long long>(num_cases));
}
