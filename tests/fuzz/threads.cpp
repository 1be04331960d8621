// Every method from several threads at once, for ThreadSanitizer.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "cache_operations.hpp"

using namespace sglang_hvd;

namespace {

void serve(CacheCore& core, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<Token> prompt;
    for (int request = 0; request < 40; ++request) {
        // Turns of one session, now and then a new one.
        if (request % 6 == 0) prompt.clear();
        for (auto more = random() % 4000; more > 0; --more) {
            prompt.push_back(static_cast<Token>(random() % 50));
        }
        const auto slot = core.start(request % 2 ? "odd" : "even", prompt);
        std::vector<std::uint8_t> noise(8, static_cast<std::uint8_t>(random()));
        for (int step = 0; step < 20; ++step) {
            fuzz::Bytes bytes(noise);
            fuzz::propose(core, {slot}, bytes);
            const std::vector<Token> tokens(random() % 40, static_cast<Token>(random() % 50));
            const auto length = static_cast<std::int32_t>(tokens.size());
            core.commit({&slot, 1}, tokens.data(), tokens.size(), {&length, 1});
        }
        core.finish(slot, true, std::nullopt);
    }
}

}  // namespace

int main() {
    CacheSettings settings;
    settings.shared_tokens = 6000;
    settings.namespace_tokens = 4000;
    settings.session_tokens = 20'000;
    CacheCore core(settings);
    std::atomic<bool> is_done = false;
    std::thread observer([&] {
        while (!is_done) {
            if (const char* broken = core.check()) fuzz::require(false, broken);
            core.stats();
            core.flush("odd");
            core.resize(5000 + core.stats().num_requests, 4000);
            if (core.stats().num_sessions > 2) core.flush_all();
            std::this_thread::yield();
        }
    });
    std::vector<std::thread> servers;
    for (std::uint32_t seed = 0; seed < 3; ++seed) servers.emplace_back(serve, std::ref(core), seed);
    for (auto& server : servers) server.join();
    is_done = true;
    observer.join();
    core.drain();
    if (const char* broken = core.check()) fuzz::require(false, broken);
    std::puts("threads: sound");
}
