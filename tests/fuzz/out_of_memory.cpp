// Makes calls for which there is no memory. Each throws, has changed nothing but what it evicted, and works
// when it is repeated. Usage: out_of_memory [SEEDS]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cache_operations.hpp"

namespace {

// How many more allocations of this thread succeed; negative: all of them.
thread_local long num_left = -1;

void* allocate(std::size_t size, std::size_t align) {
    if (num_left == 0) throw std::bad_alloc();
    if (num_left > 0) --num_left;
    void* memory = std::aligned_alloc(align, (size + align - 1) / align * align);
    if (!memory) throw std::bad_alloc();
    return memory;
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t align) {
    return allocate(size, static_cast<std::size_t>(align));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

using namespace sglang_hvd;
using fuzz::require;

namespace {

long num_failed = 0;

struct Model {
    std::size_t num_requests = 0, num_tokens = 0;

    void check(const CacheCore& core) const {
        if (const char* broken = core.check()) require(false, broken);
        const auto stats = core.stats();
        require(stats.num_requests == num_requests, "a request is lost or half added");
        require(stats.num_request_tokens == num_tokens, "a request's tokens are half added");
    }
};

// Repeats a call with more and more memory until it succeeds.
template <typename Call>
void call_until_it_works(const CacheCore& core, const Model& before, Call call) {
    for (long num = 0;; ++num) {
        num_left = num;
        try {
            call();
            num_left = -1;
            return;
        } catch (const std::bad_alloc&) {
            num_left = -1;
            ++num_failed;
        }
        before.check(core);
    }
}

void run(std::uint32_t seed) {
    std::mt19937 random(seed);
    CacheSettings settings;
    settings.shared_tokens = random() % 4 * 1500;
    settings.namespace_tokens = random() % 4 * 1000;
    settings.session_tokens = random() % 2 * 4096;
    settings.indexes_in_background = seed % 3 == 0;
    if (seed % 3 == 1) settings.paper = PaperSettings{};
    CacheCore core(settings);
    struct Active {
        CacheCore::Slot slot;
        std::size_t num_tokens;
    };
    std::vector<Active> active;
    Model model;
    const auto tokens = [&random](std::size_t most) {
        std::vector<Token> tokens(random() % most);
        for (Token& token : tokens) token = static_cast<Token>(random() % 5);
        return tokens;
    };
    for (int step = 0; step < 40; ++step) {
        core.drain();
        const auto what = random() % 8;
        const std::string space = "a name too long to stand in the string itself " + std::to_string(random() % 4);
        if (what < 2) {
            const auto prompt = tokens(3000);
            CacheCore::Slot slot = 0;
            call_until_it_works(core, model, [&] { slot = core.start(space, prompt); });
            active.push_back({slot, prompt.size()});
            ++model.num_requests;
            model.num_tokens += prompt.size();
        } else if (what < 4) {
            const auto row = tokens(2000);
            std::vector<Token> rows;
            std::vector<CacheCore::Slot> slots;
            for (auto& [slot, num_tokens] : active) {
                slots.push_back(slot);
                rows.insert(rows.end(), row.begin(), row.end());
                num_tokens += row.size();
            }
            const std::vector<std::int32_t> lengths(active.size(), static_cast<std::int32_t>(row.size()));
            call_until_it_works(core, model, [&] { core.commit(slots, rows.data(), row.size(), lengths); });
            model.num_tokens += active.size() * row.size();
        } else if (what < 6 && !active.empty()) {
            const std::size_t which = random() % active.size();
            const auto [slot, num_tokens] = active[which];
            const bool keeps = random() % 4 != 0;
            const auto given = tokens(1500);
            std::optional<std::span<const Token>> output;
            if (random() % 2) output = given;
            call_until_it_works(core, model, [&] { core.finish(slot, keeps, output); });
            active.erase(active.begin() + static_cast<std::ptrdiff_t>(which));
            --model.num_requests;
            model.num_tokens -= num_tokens;
        } else if (what == 6) {
            call_until_it_works(core, model, [&] { core.flush(space); });
        } else {
            const std::size_t shared = random() % 4 * 1500, each = random() % 4 * 1000;
            call_until_it_works(core, model, [&] { core.resize(shared, each); });
        }
        core.drain();
        model.check(core);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int num_seeds = argc > 1 ? std::atoi(argv[1]) : 15;
    for (int seed = 0; seed < num_seeds; ++seed) run(static_cast<std::uint32_t>(seed));
    require(num_failed > num_seeds, "memory was always enough");
    std::printf("out of memory %ld times: sound\n", num_failed);
}
