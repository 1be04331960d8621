// Runs the same operations from a random number generator, for compilers without libFuzzer.
// Usage: random_inputs SECONDS [FIRST_SEED]. The file last_seed.txt tells the seed of a failure.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "cache_operations.hpp"

int main(int argc, char** argv) {
    const int seconds = argc > 1 ? std::atoi(argv[1]) : 60;
    auto seed = static_cast<std::uint32_t>(argc > 2 ? std::atoi(argv[2]) : 0);
    const auto stop = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    std::uint32_t num_runs = 0;
    for (; std::chrono::steady_clock::now() < stop; ++seed, ++num_runs) {
        if (FILE* file = std::fopen("last_seed.txt", "w")) {
            std::fprintf(file, "%u\n", seed);
            std::fclose(file);
        }
        std::mt19937 random(seed);
        std::vector<std::uint8_t> data(random() % 300);
        for (auto& byte : data) byte = static_cast<std::uint8_t>(random());
        sglang_hvd::fuzz::run(data);
    }
    std::printf("%u runs, last seed %u\n", num_runs, seed);
}
