#!/usr/bin/env bash
# The check of one GPU, under six minutes: tests, then measurements, then a short table.
#
#   benchmarks/gpu/check.sh                          # everything, on the GPU
#   benchmarks/gpu/check.sh kernels layer            # these parts; their rows are added to the file
#   benchmarks/gpu/check.sh --device cpu --small     # whether the programs work; measures nothing
#
# Rows go to $OUT/gpu.jsonl, with the output in check.log beside it; without OUT to
# benchmarks/results/gpu.jsonl, those of a CPU to a temporary file.
# PYTHON names the interpreter; COMMIT the commit, where there is no git. docs/gpu.md says more.
# The exit status is 1 if a part failed or ran out of time. A missed bar is no failure.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
python=${PYTHON:-python3}

# Seconds of each part; 350 in all.
declare -A limit=([tests]=95 [parity]=30 [syncs]=15 [kernels]=40 [layer]=60 [memory]=20
                  [ep8]=45 [calibration]=20 [training]=25)
order=(tests parity syncs kernels layer memory ep8 calibration training)

run_tests() {
    # Only the files that have such tests: others import what need not be here.
    local files
    mapfile -t files < <(grep -rlE 'mark\.gpu\b' tests --include='*.py' \
        | sed 's|/conftest\.py$||' | sort -u)
    if ((${#files[@]} == 0)); then
        echo "tests: none is marked gpu"
        return 0
    fi
    if ! "$python" -c 'import pytest' 2>/dev/null; then
        echo "tests: not run, pytest is not installed"
        return 0
    fi
    timeout -k 1 "$1" "$python" -m pytest -c benchmarks/gpu/pytest.ini --rootdir . \
        -m gpu "${files[@]}"
    local status=$?
    if ((status == 5)) && [[ $device == cpu ]]; then
        echo "tests: all of them need a GPU"
        return 0
    fi
    return "$status"
}

main() {
    local part started status failed=()
    for part in "${parts[@]}"; do
        started=$SECONDS
        if [[ $part == tests ]]; then
            run_tests "${limit[tests]}"
        else
            timeout -k 1 "${limit[$part]}" \
                "$python" -m "benchmarks.gpu.$part" "${options[@]}" --out "$rows"
        fi
        status=$?
        echo "$part: $((SECONDS - started)) s, exit status $status"
        ((status == 0)) || failed+=("$part")
    done
    echo
    "$python" -m benchmarks.gpu.table "$rows" || failed+=(table)
    echo
    echo "rows: $rows"
    if ((${#failed[@]})); then
        echo "FAILED: ${failed[*]}"
        return 1
    fi
}

options=() parts=() device=cuda
while (($#)); do
    case $1 in
        --device) device=$2; options+=(--device "$2"); shift ;;
        --small) options+=(--small) ;;
        *) [[ -v limit[$1] ]] || { echo "check.sh: no part $1; parts: ${order[*]}" >&2; exit 2; }
           parts+=("$1") ;;
    esac
    shift
done
if [[ -n ${OUT:-} ]]; then
    mkdir -p "$OUT"
    rows=$OUT/gpu.jsonl
elif [[ $device == cpu ]]; then
    rows=$(mktemp -t gpu-XXXXXX.jsonl)
else
    rows=benchmarks/results/gpu.jsonl
fi
if ((${#parts[@]} == 0)); then
    parts=("${order[@]}")
    : >"$rows"
fi
if [[ -n ${OUT:-} ]]; then
    main 2>&1 | tee "$OUT/check.log"
    exit "${PIPESTATUS[0]}"
fi
main
