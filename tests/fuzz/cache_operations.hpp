// Turns any bytes into operations on a suffix cache, and checks the cache after each of them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache_core.hpp"

namespace sglang_hvd::fuzz {

class Bytes {
public:
    explicit Bytes(std::span<const std::uint8_t> data) : data_(data) {}
    bool is_empty() const { return data_.empty(); }
    int next() {
        if (data_.empty()) return 0;
        const int value = data_.front();
        data_ = data_.subspan(1);
        return value;
    }
    // Runs of few different tokens, with extremes among them and sometimes one that is not allowed.
    std::vector<Token> tokens() {
        std::vector<Token> tokens;
        const int num_runs = next() % 8;
        for (int run = 0; run < num_runs; ++run) {
            const int what = next(), length = next();
            const Token token = what < 4     ? Token{0x7FFFFFFF}
                                : what == 4 ? Token{-1 - length}
                                            : what % 5;
            const int times = what % 7 == 0 ? 6 * length : length % 16;
            for (int i = 0; i < times; ++i) tokens.push_back(what % 3 ? token : i % 7);
        }
        return tokens;
    }

private:
    std::span<const std::uint8_t> data_;
};

inline void require(bool is_true, const char* what) {
    if (is_true) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::abort();
}

inline void propose(CacheCore& core, const std::vector<CacheCore::Slot>& slots, Bytes& bytes) {
    constexpr std::size_t kWidth = 80;
    const std::size_t n = slots.size();
    std::vector<Token> token_ids(n * kWidth);
    std::vector<std::int32_t> parents(n * kWidth), depths(n * kWidth), most(n);
    std::vector<float> probs(n * kWidth), matches(n * kMatchColumns), evidence(n * kEvidenceColumns);
    std::vector<std::int32_t> num_nodes(n);
    for (auto& max : most) max = bytes.next() - 20;
    const bool is_tree = bytes.next() % 2 != 0;
    const DraftRows drafts{kWidth,       token_ids.data(), parents.data(), depths.data(),
                           probs.data(), num_nodes.data(), matches.data(), evidence.data()};
    core.propose(slots, is_tree ? DraftShape::kTree : DraftShape::kChain, false, true, most, drafts);
    for (std::size_t i = 0; i < n; ++i) {
        require(num_nodes[i] <= std::max(most[i], 0), "a draft is longer than asked");
        for (std::size_t at = i * kWidth; at < i * kWidth + drafts.length(i); ++at) {
            const int parent = parents[at], node = static_cast<int>(at - i * kWidth);
            require(parent < node && parent >= -1, "a parent stands after its child");
            const int above = parent < 0 ? 0 : depths[i * kWidth + static_cast<std::size_t>(parent)];
            require(depths[at] == above + 1 && above < kLookAhead, "a depth is wrong");
            require(token_ids[at] >= 0, "a draft reaches over the end of a sequence");
            require(probs[at] >= 0 && probs[at] <= 1, "a probability is none");
        }
    }
}

// Copies all outputs in pieces.
inline void copy(const CacheCore& core, std::size_t max_tokens) {
    std::uint64_t serial = 0;
    while (true) {
        const auto copies = core.copy_after(serial, max_tokens + 1);
        if (copies.last_serial == 0) return;
        require(copies.last_serial > serial, "an output is copied twice");
        require(copies.spaces.size() == copies.lengths.size(), "an output has no namespace");
        std::size_t num_tokens = 0;
        for (const auto length : copies.lengths) num_tokens += static_cast<std::size_t>(length);
        require(num_tokens == copies.token_ids.size(), "a copy has another length");
        for (const Token token : copies.token_ids) require(token >= 0, "a copy reaches over its end");
        serial = copies.last_serial;
    }
}

inline void run(std::span<const std::uint8_t> data) {
    Bytes bytes(data);
    CacheSettings settings;
    const int flags = bytes.next();
    settings.shared_tokens = static_cast<std::size_t>(bytes.next()) * 32;
    settings.namespace_tokens = static_cast<std::size_t>(bytes.next()) * 32;
    settings.session_tokens = static_cast<std::size_t>(flags / 8 % 4) * 2048;
    settings.indexes_in_background = flags % 2 != 0;
    if (flags % 8 == 2) settings.paper = PaperSettings{};
    CacheCore core(settings);
    std::vector<CacheCore::Slot> active;
    std::vector<Token> prompt;
    const char* names[] = {"", "a", "b"};
    while (!bytes.is_empty()) {
        try {
            switch (bytes.next() % 10) {
                case 0: {
                    const int how = bytes.next();
                    // The next turn of a session: the last prompt or a part of it, and more.
                    if (how % 2) prompt.resize(prompt.size() > 2000 ? 0 : prompt.size() * 15 / 16);
                    else prompt.clear();
                    const auto more = bytes.tokens();
                    prompt.insert(prompt.end(), more.begin(), more.end());
                    active.push_back(core.start(names[how / 2 % 3], prompt));
                    break;
                }
                case 1:
                case 2: {
                    const auto tokens = bytes.tokens();
                    const auto num = static_cast<std::int32_t>(tokens.size()) + bytes.next() % 16 / 15;
                    std::vector<Token> rows;
                    for (std::size_t i = 0; i < active.size(); ++i)
                        rows.insert(rows.end(), tokens.begin(), tokens.end());
                    const std::vector<std::int32_t> lengths(active.size(), num);
                    core.commit(active, rows.data(), tokens.size(), lengths);
                    break;
                }
                case 3:
                case 4: propose(core, active, bytes); break;
                case 5: {
                    const int which = bytes.next() % 8;  // possibly none that is active
                    const bool is_active = static_cast<std::size_t>(which) < active.size();
                    const auto slot = is_active ? active[static_cast<std::size_t>(which)] : which;
                    std::optional<std::vector<Token>> output;
                    if (bytes.next() % 2) output = bytes.tokens();
                    core.finish(slot, bytes.next() % 4 != 0, output);
                    std::erase(active, slot);
                    break;
                }
                case 6: {
                    const int which = bytes.next() % 4;
                    if (which < 3) core.flush(names[which]); else core.flush_all();
                    break;
                }
                case 7: {
                    const auto tokens = bytes.tokens();
                    const auto half = static_cast<std::int32_t>(tokens.size() / 2);
                    const std::vector<std::int32_t> lengths{half, static_cast<std::int32_t>(tokens.size()) - half};
                    core.add(names[bytes.next() % 3], tokens, lengths, std::vector<std::int64_t>{1, 2});
                    break;
                }
                case 8: copy(core, static_cast<std::size_t>(bytes.next())); break;
                default:
                    core.resize(static_cast<std::size_t>(bytes.next()) * 32,
                                static_cast<std::size_t>(bytes.next()) * 32);
            }
        } catch (const std::invalid_argument&) {
            // A refused call may not have changed anything; check() would see it.
        }
        if (const char* broken = core.check()) require(false, broken);
        require(core.stats().num_requests == active.size(), "a request is lost");
    }
    core.drain();
    if (const char* broken = core.check()) require(false, broken);
}

}  // namespace sglang_hvd::fuzz
