// Maps tokens to numbers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "token_text.hpp"

namespace sglang_hvd {

// An open-addressing table for a known number of tokens. Numbers start at 0. Probing steps grow, because
// a prompt can be made of tokens with adjacent places: with steps of one each would pass all others.
class TokenTable {
public:
    // Forgets everything and makes room for so many different tokens.
    void clear(std::size_t num_tokens) {
        entries_.assign(std::bit_ceil(2 * num_tokens + 2), {});
        shift_ = 64 - static_cast<int>(std::bit_width(entries_.size() - 1));
    }

    std::uint32_t& operator[](Token token) {
        Entry& entry = entries_[place_of(token).at];
        entry.token = token;
        return entry.number;
    }

    // How many entries are read to find a token. A test counts them instead of measuring time.
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
