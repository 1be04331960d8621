// One thread that calls every method while the cache's own thread indexes and a third one copies outputs, for
// ThreadSanitizer.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "cache_operations.hpp"

using namespace sglang_hvd;

namespace {

// Three requests at a time, each of a session of its own.
class Caller {
public:
    Caller(CacheCore& core, std::uint32_t seed) : core_(core), random_(seed), prompts_(3) {}

    void serve(int round) {
        std::vector<CacheCore::Slot> slots;
        for (auto& prompt : prompts_) {
            // Turns of one session, now and then a new one.
            if (round % 6 == 0) prompt.clear();
            for (auto more = random_() % 4000; more > 0; --more) prompt.push_back(token());
            slots.push_back(core_.start(round % 2 ? "odd" : "even", prompt));
        }
        for (int step = 0; step < 20; ++step) {
            const std::vector<std::uint8_t> noise(8, static_cast<std::uint8_t>(random_()));
            fuzz::Bytes bytes(noise);
            fuzz::propose(core_, slots, bytes);
            const std::size_t num = random_() % 40;
            std::vector<Token> rows(num * slots.size());
            for (Token& next : rows) next = token();
            const std::vector<std::int32_t> lengths(slots.size(), static_cast<std::int32_t>(num));
            core_.commit(slots, rows.data(), num, lengths);
            disturb();
        }
        for (const auto slot : slots) core_.finish(slot, random_() % 8 != 0, std::nullopt);
        for (int step = 0; step < 20; ++step) disturb();  // while outputs are indexed
    }

private:
    Token token() { return static_cast<Token>(random_() % 50); }

    void disturb() {
        switch (random_() % 16) {
            case 0: core_.flush("odd"); break;
            case 1: core_.resize(5000 + core_.stats().num_requests, 4000); break;
            case 2: if (core_.stats().num_sessions > 2) core_.flush_all(); break;
            case 3: core_.resize(random_() % 3000, 2000); core_.resize(6000, 4000); break;
            case 4: core_.drain(); break;
            case 5:
            case 6: if (const char* broken = core_.check()) fuzz::require(false, broken); break;
            case 7:
            case 8: {
                const std::vector<Token> tokens(random_() % 600, token());
                const auto length = static_cast<std::int32_t>(tokens.size());
                core_.add("odd", tokens, std::vector{length}, std::vector<std::int64_t>{1});
                core_.contents();
                break;
            }
            default: core_.stats();
        }
    }

    CacheCore& core_;
    std::mt19937 random_;
    std::vector<std::vector<Token>> prompts_;
};

}  // namespace

int main() {
    for (std::uint32_t seed = 0; seed < 3; ++seed) {
        CacheSettings settings;
        settings.shared_tokens = 6000;
        settings.namespace_tokens = 4000;
        settings.session_tokens = 20'000;
        CacheCore core(settings);
        Caller caller(core, seed);
        std::atomic<bool> is_done = false;
        std::thread copier([&] {
            while (!is_done) fuzz::copy(core, 512);
        });
        for (int round = 0; round < 40; ++round) caller.serve(round);
        is_done = true;
        copier.join();
        core.drain();
        if (const char* broken = core.check()) fuzz::require(false, broken);
    }
    std::puts("threads: sound");
}
