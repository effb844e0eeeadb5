// How the ops that are given logits are launched.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "launch.h"
#include "logits_rows.h"
#include "plan.h"

namespace adaptive_spec::cuda {

template <typename T, typename Params, typename Launch>
cudaError_t launch_rows_of(const Params& params, const Launch& launch) {
  int num_multiprocessors = 0;
  const cudaError_t error = count_multiprocessors(&num_multiprocessors);
  if (error != cudaSuccess) return error;
  const int64_t batch_size = params.round.batch_size;
  const LogitsPlan plan =
      logits_plan(batch_size, logits_rows(params).vocab_size, sizeof(T), num_multiprocessors);
  const int64_t num_blocks = batch_size * max_rows(params) * plan.num_pieces;
  if (num_blocks > kMaxGridSize) return cudaErrorInvalidConfiguration;
  launch.template operator()<T>(plan, static_cast<unsigned>(std::max<int64_t>(num_blocks, 1)));
  return cudaGetLastError();
}

// launch<T>(plan, num_blocks) launches the kernel for logits of type T.
template <typename Params, typename Launch>
cudaError_t launch_rows(const Params& params, const Launch& launch) {
  switch (logits_rows(params).type) {
    case LogitsType::kFloat16:
      return launch_rows_of<Half>(params, launch);
    case LogitsType::kBFloat16:
      return launch_rows_of<BFloat16>(params, launch);
    case LogitsType::kFloat32:
      return launch_rows_of<float>(params, launch);
    case LogitsType::kFloat64:
      break;
  }
  return cudaErrorNotSupported;
}

}  // namespace adaptive_spec::cuda
