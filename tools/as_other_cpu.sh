#!/usr/bin/env bash
# as_other_cpu.sh CPU COMMAND...: runs a command whose kernels are compiled for a weaker CPU than this one, on any x86-64.
# numba tells LLVM what the two variables say. The kernels, and what is measured with them, are kept apart.
set -eu
cpu=$1; shift
case $cpu in
  x86-64-v2) features=+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt ;;
  haswell) features=+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe ;;
  *) echo "as_other_cpu.sh: $cpu: known are haswell and x86-64-v2" >&2; exit 2 ;;
esac
if [ "$(uname -m)" != x86_64 ]; then
  echo "as_other_cpu.sh: this machine cannot run code for $cpu: skipped"
  exit 0
fi
cd "$(dirname "$0")/.."
export NUMBA_CPU_NAME=$cpu NUMBA_CPU_FEATURES=$features
export XDG_CACHE_HOME=$PWD/.venv/as-$cpu
unset NUMBA_CACHE_DIR PPSERVE_CPU_KERNELS
exec "$@"
