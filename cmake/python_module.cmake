# The Python module, on LibTorch's stable ABI (target version 2.10): one binary then serves every torch
# from 2.11 on, CPU and CUDA builds alike. Only torch's headers and libtorch_cpu are used. torch's own
# CMake package is not: it asks for the CUDA toolkit wherever torch was built with CUDA, and links
# libraries that a CPU build lacks.
set(ADAPTIVE_SPEC_TORCH_DIR "" CACHE PATH "Folder of the installed torch package")
set(ADAPTIVE_SPEC_TORCH_VERSION "unknown" CACHE STRING "Its version, recorded in the binary")
if(NOT EXISTS "${ADAPTIVE_SPEC_TORCH_DIR}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR "adaptive_spec: no torch >= 2.11 headers under '${ADAPTIVE_SPEC_TORCH_DIR}'; set ADAPTIVE_SPEC_TORCH_DIR")
endif()

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 2.13 CONFIG REQUIRED)

# The ops see torch's headers and no Python; the host classes see pybind11 and no torch, whose include
# folder brings a pybind11 of its own.
add_library(adaptive_spec_ops OBJECT
  csrc/binding/checks.cpp csrc/binding/op_args.cpp csrc/binding/ops_checks.cpp
  csrc/binding/ops_cpu.cpp csrc/binding/ops_meta.cpp csrc/binding/schemas.cpp)
target_link_libraries(adaptive_spec_ops PUBLIC adaptive_spec_core adaptive_spec_cpu)
target_include_directories(adaptive_spec_ops SYSTEM PRIVATE "${ADAPTIVE_SPEC_TORCH_DIR}/include")
target_compile_options(adaptive_spec_ops PRIVATE -Wall -Wextra)
target_compile_definitions(adaptive_spec_ops PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)

if(ADAPTIVE_SPEC_HAS_NVCC)
  target_sources(adaptive_spec_ops PRIVATE csrc/binding/ops_cuda.cpp)
  target_include_directories(adaptive_spec_ops SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
endif()

list(JOIN CMAKE_CUDA_ARCHITECTURES " " cuda_architectures)

pybind11_add_module(_C MODULE NO_EXTRAS
  csrc/binding/decision_ring.cpp csrc/binding/host.cpp csrc/binding/mapped_memory.cpp
  csrc/binding/module.cpp csrc/binding/ring_dlpack.cpp csrc/binding/step_reader.cpp)
target_link_libraries(_C PRIVATE
  adaptive_spec_ops $<TARGET_OBJECTS:adaptive_spec_cpu> "${ADAPTIVE_SPEC_TORCH_DIR}/lib/libtorch_cpu.so")
target_compile_options(_C PRIVATE -Wall -Wextra)
target_compile_definitions(_C PRIVATE
  AS_BUILD_TORCH_VERSION="${ADAPTIVE_SPEC_TORCH_VERSION}"
  AS_BUILD_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
  AS_BUILD_NVCC_VERSION="${CMAKE_CUDA_COMPILER_VERSION}"
  AS_BUILD_CUDA_ARCHITECTURES="${cuda_architectures}")
if(ADAPTIVE_SPEC_HAS_NVCC)
  target_compile_definitions(_C PRIVATE AS_CUDA)
  # The static runtime: the machine that loads the module needs a driver, and only to use a GPU.
  target_link_libraries(_C PRIVATE $<TARGET_OBJECTS:adaptive_spec_cuda> CUDA::cudart_static)
endif()
# No path to the torch of the build machine: `import torch` comes first and has libtorch loaded.
set_target_properties(_C PROPERTIES SKIP_BUILD_RPATH ON)
