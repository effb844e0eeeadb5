#!/usr/bin/env bash
# Everything that needs a GPU, in at most 8 minutes: builds for the GPU that is there, runs the GPU
# tests and benchmarks and compute-sanitizer, and leaves report.md and report.json.
#
#   benchmarks/gpu_check.sh [DIR]      DIR: $OUT, else benchmarks/results/gpu_<name>_<date>
#
# Needs nvcc, cmake, ninja and a Python (PYTHON, default python3) with torch and what pyproject.toml's
# `test` extra names; nothing is downloaded or installed. The module is built in place, for this GPU
# only. A part that fails or takes too long does not keep the next from running.
# Exit status: 0 all parts passed, 1 some did not, 2 there is no CUDA device.
set -uo pipefail
given=${1:-${OUT:-}}
[ -n "$given" ] && given=$(realpath -m "$given")
cd "$(dirname "$0")/.."

readonly PYTHON=${PYTHON:-python3}
readonly TIME_LIMIT=480
export PYTHONPATH="$PWD:$PWD/csrc" PYTHONUNBUFFERED=1
export ADAPTIVE_SPEC_REQUIRE_GPU=1 ADAPTIVE_SPEC_CUDA=1
# Where the toolkit is installed without being on the PATH.
[ -d /usr/local/cuda/bin ] && PATH="$PATH:/usr/local/cuda/bin"

gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2> /dev/null | head -1; }
capability=$(gpu compute_cap)
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null \
  || [ -z "$capability" ]; then
  echo "gpu_check: no CUDA device (nvidia-smi and $PYTHON's torch must both see one)" >&2
  exit 2
fi

name=$(gpu name | tr -cs '[:alnum:]' '_' | tr '[:upper:]' '[:lower:]')
readonly out=${given:-benchmarks/results/gpu_${name%_}_$(date +%F)}
mkdir -p "$out"
rm -f "$out"/{parts.tsv,versions.txt,report.*,bench_*}
: > "$out/parts.tsv"
: > "$out/check.log"

failed=0
# record NAME STATUS SECONDS LIMIT REASON
record() {
  printf '%s\t%s\t%s\t%s\t%s\n' "$@" >> "$out/parts.tsv"
  # After each part: what there is survives if this script does not.
  "$PYTHON" benchmarks/gpu_report.py "$out"
}

# part NAME LIMIT COMMAND...: runs it, for what is left of the time at most.
part() {
  local name=$1 limit=$2 start=$SECONDS rc
  shift 2
  [ "$limit" -gt $((TIME_LIMIT - SECONDS)) ] && limit=$((TIME_LIMIT - SECONDS))
  echo "##### $name" | tee -a "$out/check.log"
  if [ "$limit" -lt 5 ]; then
    record "$name" skipped 0 0 "out of time"
    failed=1
    return
  fi
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$out/check.log"
  rc=${PIPESTATUS[0]}
  [ "$rc" -eq 0 ] || failed=1
  record "$name" "$rc" $((SECONDS - start)) "$limit" ""
}

export TORCH_CUDA_ARCH_LIST=$capability
{
  echo "$(gpu name), compute capability $capability, driver $(gpu driver_version)"
  echo "clocks: $(gpu clocks.sm) now, $(gpu clocks.max.sm) at most; memory $(gpu clocks.mem)"
  "$PYTHON" -c 'import sys, torch; print(f"Python {sys.version.split()[0]}, torch {torch.__version__}")'
  nvcc --version | tail -2 | head -1
  cmake --version | head -1
  "$PYTHON" -c 'from adaptive_spec.testing.machine import commit; print("commit", commit())'
} > "$out/versions.txt" 2>&1
cat "$out/versions.txt"

part build 150 "$PYTHON" setup.py build_ext --inplace
part tests 180 "$PYTHON" -m pytest -m gpu -q --durations=10 --continue-on-collection-errors
for benchmark in bench_verify; do
  part "$benchmark" 120 "$PYTHON" "benchmarks/$benchmark.py" --output "$out"
done
for tool in memcheck racecheck synccheck; do
  if ! command -v compute-sanitizer > /dev/null; then
    record "$tool" skipped 0 0 "compute-sanitizer is not installed"
    continue
  fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 part "$tool" 75 \
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$PYTHON" tests/gpu/sanitizer_case.py
done

# The report holds them.
rm "$out"/{parts.tsv,versions.txt}
echo "report: $out/report.md after $SECONDS s"
exit "$failed"
