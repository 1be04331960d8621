// What kinds of tokens a request's text ends with: where in its line the next one stands, and what the
// output was like lately.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "token_flags.hpp"

namespace sglang_hvd {

class TextTail {
public:
    static constexpr int kNumMarks = 3, kLineBreakMark = 0;
    static constexpr int kWindow = 64;  // tokens of the output
    static_assert(kWindow <= 255, "the tokens of a class are counted in a byte");

    TextTail(std::span<const std::int32_t> prompt, const TokenFlags& flags) : flags_(&flags) {
        since_.fill(static_cast<int>(prompt.size()));
        std::array<bool, kNumMarks> is_found{};
        // Back to the first of them, which mostly is not far.
        for (std::size_t i = prompt.size(); i-- > 0 && !std::ranges::all_of(is_found, std::identity{});)
            for (std::size_t m = 0; m < kNumMarks; ++m)
                if (!is_found[m] && (flags.of(prompt[i]) & kMarks[m])) {
                    is_found[m] = true;
                    since_[m] = static_cast<int>(prompt.size() - 1 - i);
                }
    }

    // Tokens of the output.
    void extend(std::span<const std::int32_t> tokens) {
        for (const std::int32_t token : tokens) {
            const std::uint8_t flags = flags_->of(token);
            for (std::size_t m = 0; m < kNumMarks; ++m) since_[m] = flags & kMarks[m] ? 0 : since_[m] + 1;
            std::uint8_t& oldest = window_[num_output_ % kWindow];
            if (num_output_ >= kWindow) counts_ -= spread_of(oldest);
            oldest = flags;
            counts_ += spread_of(flags);
            ++num_output_;
        }
    }

    // Tokens behind the latest line break, punctuation, and bracket or delimiter; all of them where
    // there is none.
    int since(int mark) const { return since_[static_cast<std::size_t>(mark)]; }

    // Of the latest kWindow tokens of the output, those in a class.
    float share(int token_class) const {
        const auto num = std::clamp<std::size_t>(num_output_, 1, kWindow);
        return static_cast<float>(count_of(counts_, token_class)) / static_cast<float>(num);
    }

private:
    static constexpr std::array<std::uint8_t, kNumMarks> kMarks = {
        1 << kLineBreak, 1 << kPunctuation, 1 << kBracket | 1 << kDelimiter};

    const TokenFlags* flags_;
    std::array<int, kNumMarks> since_;
    std::array<std::uint8_t, kWindow> window_{};  // a ring
    std::uint64_t counts_ = 0;                    // of what is in window_
    std::size_t num_output_ = 0;
};

}  // namespace sglang_hvd
