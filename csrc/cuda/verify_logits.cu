#include "launch.h"
#include "plan.h"
#include "verify_logits.cuh"

namespace adaptive_spec::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kLogitsThreads, kLogitsBlocksPerMultiprocessor)
    verify_logits_kernel(const __grid_constant__ VerifyChainLogitsParams params,
                         const LogitsPlan plan) {
  __shared__ LogitsShared shared;
  verify_logits_body<T>(params, plan, shared);
}

template <typename T>
cudaError_t launch_verify(const VerifyChainLogitsParams& params, cudaStream_t stream) {
  int num_multiprocessors = 0;
  const cudaError_t error = count_multiprocessors(&num_multiprocessors);
  if (error != cudaSuccess) return error;
  const RoundParams& round = params.round;
  const LogitsPlan plan =
      logits_plan(round.batch_size, params.logits.vocab_size, sizeof(T), num_multiprocessors);
  const int64_t num_pieces = round.batch_size * (round.num_steps + 1) * plan.num_pieces;
  if (num_pieces > kMaxGridSize) return cudaErrorInvalidConfiguration;
  const unsigned num_blocks = static_cast<unsigned>(std::max<int64_t>(num_pieces, 1));
  verify_logits_kernel<T><<<num_blocks, kLogitsThreads, 0, stream>>>(params, plan);
  return cudaGetLastError();
}

}  // namespace

bool needs_workspace(const VerifyChainLogitsParams&) { return true; }

cudaError_t launch(const VerifyChainLogitsParams& params, cudaStream_t stream) {
  switch (params.logits.type) {
    case LogitsType::kFloat16:
      return launch_verify<Half>(params, stream);
    case LogitsType::kBFloat16:
      return launch_verify<BFloat16>(params, stream);
    case LogitsType::kFloat32:
      return launch_verify<float>(params, stream);
    case LogitsType::kFloat64:
      break;
  }
  return cudaErrorNotSupported;
}

}  // namespace adaptive_spec::cuda
