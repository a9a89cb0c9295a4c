#!/usr/bin/env bash
# Runs one stage of the GPU suite from a built checkout (flash_ext/*.so in place), without a network.
#
#   benchmarks/gpu_suite.sh STAGE [options]
#
#   demo       info, the probe kernel of each built path, the demo without real input
#   tests      the tests of one path on the GPU
#   repeat     1,000 deterministic backwards while another stream loads memory, two streams and two graphs at once
#   train      a byte-level GPT with flash_ext and with PyTorch's attention; loss curves; the other tests of training
#   step       whole training steps with flash_ext and with PyTorch's attention: time and peak memory
#   sanitizer  the small tests (-m sanitizer) under compute-sanitizer: memcheck, synccheck, and racecheck for sm80
#   emulator   the kernels of a path on the GPU against the same in the PTX emulator (the build folder has their PTX)
#   bench      the benchmark, with recording and plots
#   compare    two recordings: compare A.json B.json; or compare A.json, against the last bench in the output folder
#
#   --path sm80|sm90|sm100|cpu    force a path (default: what serves this GPU)
#   --direction forward|backward  narrow the tests, the sanitizer or the benchmark to one direction
#   --rows REGEX                  bench: only rows whose name matches
#   --deterministic               bench: the deterministic backward beside the default one
#   --rounds N                    bench: turns of each provider (default 3)
#   --tools "memcheck ..."        sanitizer: which tools
#   --shared-memory BYTES         tests: with so much shared memory per CTA (101376: GPUs of compute capability 8.6, 8.9
#                                 and 12.0; 166912: 8.0), only what then runs on other tiles
#   --jobs N                      tests: processes that share the GPU (default 4; 1 without pytest-xdist)
#   --limit SECONDS               stop the stage after this long (default 470)
#   --out DIR                     where logs, recordings and plots go (default: $OUT, else build/gpu_suite)
#
# PYTHON names the interpreter (default python3). Every stage ends with a summary and an exit status that is not 0 when
# something failed.
set -u -o pipefail

usage() { sed -n '2,/^set -u/p' "$0" | sed -e '/^set -u/d' -e 's/^# \{0,1\}//'; }
die() { echo "gpu_suite.sh: $*" >&2; exit 2; }

[ $# -ge 1 ] || { usage; exit 2; }
stage=$1
shift
case $stage in -h | --help) usage; exit 0 ;; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
path="" direction="" rows="" rounds=3 tools="" jobs=4 limit=470 shared_memory="" deterministic=""
out=${OUT:-$root/build/gpu_suite}
files=()
while [ $# -gt 0 ]; do
    case $1 in
        --path | --direction | --rows | --rounds | --tools | --jobs | --limit | --out)
            [ $# -ge 2 ] || die "$1 needs a value"
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        --shared-memory)
            [ $# -ge 2 ] || die "$1 needs a value"
            shared_memory=$2
            shift 2
            ;;
        --deterministic)
            deterministic=--deterministic
            shift
            ;;
        -*) die "unknown option $1 (see --help)" ;;
        *) files+=("$(realpath -m "$1")"); shift ;;
    esac
done
case $path in "" | sm80 | sm90 | sm100 | cpu) ;; *) die "--path $path: expected sm80, sm90, sm100 or cpu" ;; esac
case $direction in "" | forward | backward) ;; *) die "--direction $direction: expected forward or backward" ;; esac
[ ${#files[@]} -eq 0 ] || [ "$stage" = compare ] || die "unexpected argument ${files[0]}"

mkdir -p "$out" || die "cannot make $out"
out=$(cd "$out" && pwd)
cd "$root" || exit 2
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
label=${path:-auto}${direction:+-$direction}${deterministic:+-deterministic}${shared_memory:+-$shared_memory}
started=$SECONDS
failures=()
summary=()

# run NAME COMMAND...: runs a command within what is left of the limit, its output shown and kept in NAME.log; returns
# the command's status.
run() {
    local name=$1 left=$((limit - (SECONDS - started))) status
    shift
    [ "$left" -gt 5 ] || { summary+=("$name: not run, the limit of $limit s is reached"); failures+=("$name"); return 124; }
    echo "== $name: $*"
    timeout --signal=INT --kill-after=10 "$left" "$@" 2>&1 | tee "$out/$name.log"
    status=${PIPESTATUS[0]}
    [ "$status" -ne 124 ] || echo "$name: stopped after $left s" | tee -a "$out/$name.log"
    return "$status"
}

# check NAME COMMAND...: as run; a status other than 0 is a failure of the stage.
check() {
    local name=$1 status
    run "$@"
    status=$?
    if [ "$status" -ne 0 ]; then
        failures+=("$name")
        summary+=("$name: FAILED (exit status $status)")
    else
        summary+=("$name: ok")
    fi
    return "$status"
}

default_path() {
    "$python" - <<'PYTHON'
import torch
import flash_ext
q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
print(flash_ext.explain(q, q, q).path)
PYTHON
}

select_tests() { # sets `selection` for pytest -k: test names and parameters carry the direction
    case $direction in
        forward) selection=(-k "not backward") ;;
        backward) selection=(-k backward) ;;
        *) selection=() ;;
    esac
}

stage_demo() {
    check info "$python" -m flash_ext info
    check probe "$python" - <<'PYTHON'
import torch
from flash_ext import _C
paths = _C.available_paths()
served = 0
for path in paths:
    x = torch.zeros(1 << 20, device="cuda")
    try:
        _C.probe(path, x, 2.5)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"{path}: {error}")  # a path whose machine code this GPU cannot run says so
        continue
    if not bool((x == 2.5).all()):
        raise SystemExit(f"{path}: the probe kernel left wrong values")
    print(f"{path}: the probe kernel wrote {x.numel()} values")
    served += 1
raise SystemExit(0 if served else "no probe kernel ran")
PYTHON
    check demo "$python" -m flash_ext demo --no-model ${path:+--path "$path"}
}

stage_tests() {
    local test_path=${path:-$(default_path)} parallel=() selection status
    [ -n "$test_path" ] || die "no path serves this machine"
    select_tests
    if [ "$jobs" -gt 1 ] && "$python" -c 'import xdist' 2>/dev/null; then parallel=(-n "$jobs"); fi
    check tests "$python" -m pytest tests --path "$test_path" -q -p no:cacheprovider -m "not large" \
        "${parallel[@]}" "${selection[@]}" ${shared_memory:+--shared-memory "$shared_memory"}
    # Tests over 8 GB run alone. Exit status 5: there are none.
    run tests-large "$python" -m pytest tests --path "$test_path" -q -p no:cacheprovider -m large "${selection[@]}" \
        ${shared_memory:+--shared-memory "$shared_memory"}
    status=$?
    case $status in
        0) summary+=("tests-large: ok") ;;
        5) summary+=("tests-large: none selected") ;;
        124) ;;
        *) failures+=(tests-large); summary+=("tests-large: FAILED (exit status $status)") ;;
    esac
    for name in tests tests-large; do
        [ -f "$out/$name.log" ] && summary+=("$name: $(grep -E '(passed|failed|error|no tests ran)' "$out/$name.log" | tail -1)")
    done
}

stage_repeat() {
    local test_path=${path:-$(default_path)}
    [ -n "$test_path" ] || die "no path serves this machine"
    check repeat "$python" -m pytest tests/test_reported_bugs.py tests/test_contract_cuda.py --path "$test_path" -q \
        -p no:cacheprovider -k "under_load or two_streams or two_graphs"
}

stage_train() {
    local test_path=${path:-$(default_path)}
    [ -n "$test_path" ] || die "no path serves this machine"
    export FLASH_EXT_TEST_PLOTS=$out
    check train "$python" -m pytest tests/test_training.py --path "$test_path" -q -p no:cacheprovider --durations=0
}

stage_step() {
    local quick=""
    [ "$path" != cpu ] || quick=--quick
    check step env ${path:+FLASH_EXT_PATH="$path"} "$python" benchmarks/training_step.py --rounds "$rounds" $quick \
        --json "$out/step-$label.json"
}

stage_sanitizer() {
    local test_path=${path:-$(default_path)} selection errors
    command -v compute-sanitizer >/dev/null || die "compute-sanitizer is not on PATH (it comes with the CUDA toolkit)"
    [ -n "$test_path" ] || die "no path serves this machine"
    select_tests
    # racecheck knows cp.async, but reports false hazards for TMA and its barriers: sm80 only by default.
    if [ -z "$tools" ]; then
        tools="memcheck synccheck"
        [ "$test_path" != sm80 ] || tools="$tools racecheck"
    fi
    # Without PyTorch's caching allocator each tensor is an allocation of its own, and an access past its end is seen.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in $tools; do
        # Only flash_ext's kernels: their mangled names hold the namespace. 99: errors were found. API errors that
        # PyTorch itself probes for are not reported; flash_ext raises its own.
        check "sanitizer-$tool" compute-sanitizer --tool "$tool" --kernel-name kns=9flash_ext --error-exitcode 99 \
            --report-api-errors no --launch-timeout 0 --target-processes all \
            "$python" -m pytest tests --path "$test_path" -q -p no:cacheprovider -m sanitizer -x "${selection[@]}"
        errors=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/sanitizer-$tool.log" | tail -1)
        summary+=("sanitizer-$tool: ${errors:-no summary: the tool did not finish}")
        [ -n "$errors" ] || failures+=("sanitizer-$tool")
    done
}

stage_emulator() {
    local test_path=${path:-$(default_path)}
    [ -n "$test_path" ] || die "no path serves this machine"
    check emulator-build "$python" -m tests.ptx_emulator.build --path "$test_path" --jobs "$jobs" || return
    check emulator-write env FLASH_EXT_EMULATE="$test_path" FLASH_EXT_LIBRARY_DIR="$root/build/emulator/$test_path" \
        "$python" -m tests.ptx_emulator.compare --path "$test_path" --write "$out/emulator-$test_path.npz" || return
    check emulator-compare "$python" -m tests.ptx_emulator.compare --path "$test_path" \
        --against "$out/emulator-$test_path.npz" --json "$out/emulator-$test_path.json"
}

stage_bench() {
    check bench "$python" -m flash_ext bench ${path:+--path "$path"} ${direction:+--direction "$direction"} \
        ${rows:+--rows "$rows"} --rounds "$rounds" $deterministic --json "$out/bench-$label.json" --plot "$out/plots-$label"
    summary+=("$(grep -E '^(forward|backward): geometric' "$out/bench.log" | sed 's/^/bench: /')")
}

stage_compare() {
    case ${#files[@]} in
        1) files+=("$(ls -t "$out"/bench-*.json 2>/dev/null | head -1)") ;;
        2) ;;
        *) die "compare needs one or two recordings" ;;
    esac
    [ -n "${files[1]}" ] || die "no bench-*.json in $out to compare with"
    check compare "$python" -m flash_ext bench --compare "${files[0]}" "${files[1]}"
}

case $stage in
    demo | tests | repeat | train | step | sanitizer | emulator | bench | compare) "stage_$stage" ;;
    *) die "unknown stage $stage (see --help)" ;;
esac

echo
echo "== $stage ${label}: $((SECONDS - started)) s, output in $out"
for line in "${summary[@]}"; do echo "  $line"; done
if [ ${#failures[@]} -gt 0 ]; then
    echo "  FAILED: ${failures[*]}"
    exit 1
fi
echo "  passed"
