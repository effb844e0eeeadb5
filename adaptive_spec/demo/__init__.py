"""What `adaptive-spec demo` runs: one workload under several ways to choose S, and the outcome."""
