#include "launch.h"
#include "plan.h"
#include "update.cuh"

namespace adaptive_spec::cuda {
namespace {

__global__ void update_kernel(const __grid_constant__ UpdateParams params) {
  __shared__ FinishShared shared;
  update_body(params, shared);
}

__global__ void chain_tree_kernel(const __grid_constant__ ChainTreeParams params) {
  chain_tree_body(params);
}

}  // namespace

cudaError_t launch(const UpdateParams& params, cudaStream_t stream) {
  const LaunchShape shape = update_shape(params.batch_size);
  update_kernel<<<shape.num_blocks, shape.num_threads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch(const ChainTreeParams& params, cudaStream_t stream) {
  const LaunchShape shape = chain_tree_shape(params.batch_size, params.num_nodes);
  chain_tree_kernel<<<shape.num_blocks, shape.num_threads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace adaptive_spec::cuda
