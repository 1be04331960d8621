// clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -DHVD_CHECKED
#include <cstddef>
#include <cstdint>

#include "cache_operations.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    sglang_hvd::fuzz::run({data, size});
    return 0;
}
