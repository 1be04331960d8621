#!/usr/bin/env bash
# Fuzzes the native suffix cache under AddressSanitizer and UndefinedBehaviorSanitizer. Then it makes calls
# for which there is no memory, and runs a calling thread and the indexing thread under ThreadSanitizer. Last,
# whole steps of a drafter run under all three.
# With clang++, libFuzzer chooses the inputs; otherwise a random generator does.
#   tests/fuzz/run.sh [SECONDS, default 60] [FOLDER for builds and the corpus]
set -euo pipefail
seconds=${1:-60}
folder=${2:-$(mktemp -d)}
here=$(cd "$(dirname "$0")" && pwd)
package=$here/../../sglang_hvd
# -g1: sanitizers name lines and need no variables. It builds in two thirds of the time.
flags=(-std=c++20 -g1 -O1 -Wall -Wextra -pthread -DHVD_CHECKED -fno-omit-frame-pointer -I "$package/native"
    -I "$package/suffix_cache/native")
rooms=(-Wno-psabi -ffp-contract=off)
for room in payoff allocation drafter plugin/trees plugin/engine; do rooms+=(-I "$package/$room/native"); done
checks=(-fsanitize=address,undefined -fno-sanitize-recover=all)
mkdir -p "$folder/corpus"
cd "$folder"
if command -v clang++ > /dev/null; then
    clang++ "${flags[@]}" "${checks[@]}" -fsanitize=fuzzer "$here/libfuzzer_target.cpp" -o fuzzer
    ./fuzzer -max_total_time="$seconds" -max_len=1024 corpus
    CXX=clang++
else
    CXX=${CXX:-g++}
    "$CXX" "${flags[@]}" "${checks[@]}" "$here/random_inputs.cpp" -o random_inputs
    ./random_inputs "$seconds"
fi
# The checks above give every block an allocation of its own. Here blocks come from the pool, as when serving.
"$CXX" "${flags[@]}" "${checks[@]}" -UHVD_CHECKED "$here/random_inputs.cpp" -o random_inputs_pooled
./random_inputs_pooled "$((seconds / 6))"
"$CXX" "${flags[@]}" "${checks[@]}" -UHVD_CHECKED "$here/block_pool.cpp" -o block_pool
./block_pool
"$CXX" "${flags[@]}" "${checks[@]}" -Wno-mismatched-new-delete "$here/out_of_memory.cpp" -o out_of_memory
./out_of_memory
"$CXX" "${flags[@]}" -fsanitize=thread "$here/threads.cpp" -o threads
./threads
"$CXX" "${flags[@]}" "${rooms[@]}" "${checks[@]}" "$here/steps.cpp" -o steps
./steps "$((seconds / 3))"
"$CXX" "${flags[@]}" "${rooms[@]}" -fsanitize=thread "$here/steps.cpp" -o steps_threads
./steps_threads "$((seconds / 6))"
