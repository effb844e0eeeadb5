// The one macro the core needs: a function that compiles for the host and, under nvcc, for the
// device.
#pragma once

#if defined(__CUDACC__)
#define AS_HD __host__ __device__ __forceinline__
#else
#define AS_HD inline
#endif
