// The kernels' memory functions with a scheduling point in front of each atomic, where other lanes
// and blocks may come in between. Include this before the kernel bodies.
#pragma once

#include "cuda_shim.h"
#include "records.h"

// What is defined here is left as it was: a macro does not expand inside itself.
#define __atomic_load_n(...) (cuda_shim::scheduling_point(), __atomic_load_n(__VA_ARGS__))
#define __atomic_fetch_add(...) (cuda_shim::scheduling_point(), __atomic_fetch_add(__VA_ARGS__))
#define __atomic_compare_exchange_n(...) \
  (cuda_shim::scheduling_point(), __atomic_compare_exchange_n(__VA_ARGS__))
#include "memory.cuh"
#undef __atomic_load_n
#undef __atomic_fetch_add
#undef __atomic_compare_exchange_n
