// The macros that the core needs: a function that compiles for the host and, under nvcc, for the
// device; and a loop whose arrays stay in registers only if nvcc unrolls it.
#pragma once

#if defined(__CUDACC__)
#define AS_HD __host__ __device__ __forceinline__
#else
#define AS_HD inline
#endif

#if defined(__CUDA_ARCH__)
#define AS_UNROLL _Pragma("unroll")
#else
#define AS_UNROLL
#endif
