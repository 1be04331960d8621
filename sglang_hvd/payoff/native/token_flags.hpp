// The classes of a vocabulary's tokens, one bit per class: TokenClass of token_classes.py.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sglang_hvd {

constexpr int kNumClasses = 8;
constexpr int kNumPaperClasses = 5;

// Marks are where a text may change: line breaks, punctuation, structure (brackets and delimiters), digits.
constexpr std::array<std::uint8_t, 4> kMarks = {4, 2, 8 | 16, 128};
constexpr std::size_t kLineBreakMark = 0;

class TokenFlags {
public:
    explicit TokenFlags(std::span<const std::uint8_t> flags) : flags_(flags.begin(), flags.end()) {}

    // Ids outside the vocabulary are in no class.
    std::uint8_t of(std::int32_t token) const {
        const auto index = static_cast<std::size_t>(token);
        return token >= 0 && index < flags_.size() ? flags_[index] : std::uint8_t{0};
    }

private:
    std::vector<std::uint8_t> flags_;
};

// Spreads the bits over the bytes of an integer: the sum of up to 255 such integers counts tokens by class.
inline std::uint64_t spread_of(std::uint8_t flags) {
    static constexpr auto table = [] {
        std::array<std::uint64_t, 256> spread{};
        for (std::uint64_t f = 0; f < 256; ++f)
            for (int c = 0; c < kNumClasses; ++c) spread[f] |= (f >> c & 1) << 8 * c;
        return spread;
    }();
    return table[flags];
}

inline int count_of(std::uint64_t spread, int token_class) {
    return static_cast<int>(spread >> 8 * token_class & 0xFF);
}

}  // namespace sglang_hvd
