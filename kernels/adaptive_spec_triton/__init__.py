"""The ops of adaptive_spec_ext in Triton, for the GPUs that CUDA code does not reach."""
