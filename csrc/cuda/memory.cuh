// Memory that blocks of one launch share: each access names its ordering, in the terms of the PTX
// memory model, at device scope. Where there is no device (tests run the kernel bodies on the CPU)
// the same orderings are those of C++.
#pragma once

#include <cstdint>

#include "records.h"

namespace adaptive_spec::cuda {

// Counts one arrival and tells whether it was the last of `count`; the counter is then back at 0.
// Acquire and release: what the arriving thread has seen or written before is seen by the thread
// that arrives last. With a barrier in front, that is what its whole block or warp has written;
// with one behind, its whole block or warp sees it.
__device__ __forceinline__ bool arrive_last(uint32_t* ticket, uint32_t count) {
#if defined(__CUDA_ARCH__)
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(ticket), "r"(count - 1)
               : "memory");
#else
  uint32_t before = __atomic_load_n(ticket, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(ticket, &before, before == count - 1 ? 0 : before + 1, true,
                                      __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
  }
#endif
  return before == count - 1;
}

__device__ __forceinline__ void add_relaxed(int64_t* sum, int64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("red.relaxed.gpu.add.u64 [%0], %1;" ::"l"(sum), "l"(value) : "memory");
#else
  __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
#endif
}

__device__ __forceinline__ void max_relaxed(uint32_t* word, uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("red.relaxed.gpu.max.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  uint32_t before = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (before < value && !__atomic_compare_exchange_n(word, &before, value, true,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* word) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

// 16 bytes that no other thread will want: not kept in the first-level cache.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
#if defined(__CUDA_ARCH__)
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
#else
  return *from;
#endif
}

// The adaptive state on its way to the second-level cache: the weights of a forward pass have
// driven it out since the last round, and the last block should not have to wait for it.
__device__ __forceinline__ void prefetch_state(const int64_t* words, int64_t num_words) {
#if defined(__CUDA_ARCH__)
  constexpr int64_t kWordsPerLine = 128 / kWordSize;
  const int64_t word = threadIdx.x * kWordsPerLine;
  if (blockIdx.x == 0 && words != nullptr && word < num_words) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(words + word));
  }
#else
  (void)words, (void)num_words;
#endif
}

}  // namespace adaptive_spec::cuda
