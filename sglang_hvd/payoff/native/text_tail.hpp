// What kinds of tokens a request's text ends with: where in its line the next one stands, and what the
// output was like lately.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "token_flags.hpp"

namespace sglang_hvd {

class TextTail {
public:
    static constexpr std::size_t kNumMarks = 3;  // of kMarks, the first ones
    static constexpr int kWindow = 64;  // tokens of the output
    static_assert(kWindow <= 255, "the tokens of a class are counted in a byte");

    TextTail(std::span<const std::int32_t> prompt, const TokenFlags& flags) : flags_(&flags) {
        for (std::size_t m = 0; m < kNumMarks; ++m) {  // mostly it is not far
            const auto latest = std::find_if(prompt.rbegin(), prompt.rend(), [&](std::int32_t token) {
                return (flags.of(token) & kMarks[m]) != 0;
            });
            since_[m] = static_cast<int>(latest - prompt.rbegin());
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

    // Tokens behind the latest of a mark; all of them where there is none.
    int since(std::size_t mark) const { return since_[mark]; }

    // Of the latest kWindow tokens of the output, those in a class.
    float share(int token_class) const {
        const auto num = std::clamp<std::size_t>(num_output_, 1, kWindow);
        return static_cast<float>(count_of(counts_, token_class)) / static_cast<float>(num);
    }

private:
    const TokenFlags* flags_;
    std::array<int, kNumMarks> since_;
    std::array<std::uint8_t, kWindow> window_{};  // a ring
    std::uint64_t counts_ = 0;                    // of what is in window_
    std::size_t num_output_ = 0;
};

}  // namespace sglang_hvd
