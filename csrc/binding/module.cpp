// The compiled module adaptive_spec_ext._C. Loading it registers the ops with torch (schemas.cpp,
// ops_*.cpp); what Python calls directly are the host classes below.
#include <pybind11/pybind11.h>

#include "register.h"

#if defined(AS_CUDA)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of adaptive_spec_ext.";
  // What this binary was built with, for `adaptive-spec doctor`.
  m.attr("build_info") = pybind11::dict(
      pybind11::arg("torch_version") = AS_BUILD_TORCH_VERSION,
      pybind11::arg("compiler") = AS_BUILD_COMPILER, pybind11::arg("cuda_ops") = kHasCuda,
      pybind11::arg("nvcc_version") = AS_BUILD_NVCC_VERSION,
      pybind11::arg("cuda_architectures") = AS_BUILD_CUDA_ARCHITECTURES);
  adaptive_spec::register_host(m);
}
