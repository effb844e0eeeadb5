// The ops on CUDA devices: on torch's current stream of the tensors' device.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <stdexcept>

#include "../cuda/launch.h"
#include "ops.h"
#include "sampling_rows.h"

namespace adaptive_spec {
namespace {

// Only a CUDA build of torch has this function, so it is looked up where it is needed rather than
// linked: the same binary then loads under a CPU build.
cudaStream_t current_stream(int32_t device_index) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const auto function =
      reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  if (function == nullptr) {
    throw std::runtime_error("adaptive_spec: this torch has no CUDA streams");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(function(device_index, &stream));
  return static_cast<cudaStream_t>(stream);
}

struct Cuda {
  template <typename Args>
  static void run(const Args& args) {
    check_devices(args);
    auto params = to_params(args, StateMemory::kDevice);
    const Tensor& first = first_tensor(args);
    const int32_t device_index = first.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device_index);
    // Freed on return, which on the stream is after the launch.
    OptionalTensor own_workspace;
    if constexpr (requires { params.round; }) {
      if (!params.round.workspace && cuda::needs_workspace(params)) {
        const int64_t num_words = num_workspace_words(params);
        own_workspace =
            torch::stable::new_zeros(first, {num_words}, torch::headeronly::ScalarType::Long);
        params.round.workspace =
            Workspace(static_cast<int64_t*>(own_workspace->mutable_data_ptr()), num_words);
      }
    }
    const cudaError_t error = cuda::launch(params, current_stream(device_index));
    if (error != cudaSuccess) {
      throw std::runtime_error(std::string(Args::kOp) +
                               ": launch failed: " + cudaGetErrorString(error));
    }
  }

 private:
  template <typename Params>
  static int64_t num_workspace_words(const Params& params) {
    return Workspace::num_words(params.round.batch_size, 0);
  }
  static int64_t num_workspace_words(const VerifyChainLogitsParams& params) {
    return Workspace::num_words(params.round.batch_size, params.round.num_steps + 1);
  }
  static int64_t num_workspace_words(const SampleChainLogitsParams& params) {
    return Workspace::num_words(params.round.batch_size, params.round.num_steps + 1);
  }
  static int64_t num_workspace_words(const SampleTreeLogitsParams& params) {
    return Workspace::num_words(params.round.batch_size, params.tree.num_nodes);
  }
  static int64_t num_workspace_words(const SampleTreeParams& params) {
    return Workspace::num_words(params.round.batch_size, 1);
  }
  static int64_t num_workspace_words(const SampleChainParams& params) {
    return Workspace::num_words(params.round.batch_size, max_rows_to_sum(params));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(adaptive_spec, CUDA, m) { register_ops<Cuda>(m); }

}  // namespace adaptive_spec
