// A number for each of some tokens.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "token_text.hpp"

namespace sglang_hvd {

// An open table, made for a known number of tokens. Numbers are 0 at first. Steps grow, since a prompt
// may be made of tokens whose places lie side by side: by steps of one each would pass all before it.
class TokenTable {
public:
    // Forgets all; what follows names at most so many different tokens.
    void clear(std::size_t num_tokens) {
        entries_.assign(std::bit_ceil(2 * num_tokens + 2), {});
        shift_ = 64 - static_cast<int>(std::bit_width(entries_.size() - 1));
    }

    std::uint32_t& operator[](Token token) {
        Entry& entry = entries_[place_of(token).at];
        entry.token = token;
        return entry.number;
    }

    // How many entries are looked at for a token's: what a test counts in the place of time.
    std::size_t num_looks(Token token) const { return place_of(token).num_looks; }

private:
    struct Entry {
        Token token = kEnd;
        std::uint32_t number = 0;
    };
    struct Place {
        std::size_t at, num_looks;
    };

    Place place_of(Token token) const {
        auto at = static_cast<std::size_t>(static_cast<std::uint64_t>(token) * 0x9E3779B97F4A7C15u >> shift_);
        std::size_t num_looks = 1;
        for (; entries_[at].token != token && entries_[at].token != kEnd; ++num_looks) {
            at = (at + num_looks) & (entries_.size() - 1);
        }
        return {at, num_looks};
    }

    std::vector<Entry> entries_;
    int shift_ = 0;
};

}  // namespace sglang_hvd
