#!/bin/bash
# The whole GPU suite in one visit to a machine with an NVIDIA GPU, tables last. About half an hour with TensorFlow beside it.
#
#   benchmarks/gpu_visit.sh GRAPHS OUT [STEP …]
#
# GRAPHS is made by `python benchmarks/models.py GRAPHS` where TensorFlow is (this machine may lack it). Steps, all by default:
#   tests       tests marked gpu: races, our own kernels against PyTorch's
#   hand        PyTorch's own CUDA graphs of the same models
#   small       every model at batch 1 (feature columns at 256): TensorFlow, XLA, streams, larger kernels
#   large       the same at larger batches
#   schedulers  every way to choose streams, and tuning
#   costs       static against measured costs, simulated against measured time
set -uo pipefail
cd "$(dirname "$0")/.."
graphs=$1 out=$2
shift 2
steps=("$@")
((${#steps[@]})) || steps=(tests hand small large schedulers costs)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TF_CPP_MIN_LOG_LEVEL=3
mkdir -p "$out"

for step in "${steps[@]}"; do
    echo "--- $step"
    case $step in
    tests) MSPLIT_RACE_GRAPHS=200 python3 -m pytest -q -p no:cacheprovider -m gpu tests/gpu tests/engines 2>&1 | tail -n 15 ;;
    hand) python3 benchmarks/by_hand.py "$graphs" --out "$out" 2>&1 | tail -n 12 ;;
    small | large) python3 benchmarks/gpu_suite.py "$graphs" --out "$out" --batch "$step" --name "$step" >"$out/$step.txt" 2>&1 ;;
    schedulers) python3 benchmarks/schedulers.py "$graphs" --out "$out" >"$out/schedulers.txt" 2>&1 ;;
    costs) python3 benchmarks/cost_model.py "$graphs" --out "$out" >"$out/costs.txt" 2>&1 ;;
    *) echo "there is no step $step" && exit 2 ;;
    esac || echo "--- $step failed"
done
for step in small large; do
    [[ -f $out/$step.json ]] && python3 benchmarks/table.py "$out/$step.json" && python3 benchmarks/table.py --kernels "$out/$step.json"
done
[[ -f $out/schedulers.txt ]] && tail -n 40 "$out/schedulers.txt"
[[ -f $out/costs.txt ]] && tail -n 30 "$out/costs.txt"
exit 0
