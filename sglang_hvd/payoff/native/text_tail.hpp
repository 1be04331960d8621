// The classes of the tokens that a request's text ends with: how long ago its line began, and which classes
// the latest output tokens are in.
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
    static constexpr std::size_t kNumMarks = 3;  // the first marks of kMarks are followed
    static constexpr int kWindow = 64;           // latest output tokens
    static_assert(kWindow <= 255, "a byte counts the tokens of a class");

    TextTail(std::span<const std::int32_t> prompt, const TokenFlags& flags) : flags_(&flags) {
        for (std::size_t m = 0; m < kNumMarks; ++m) {  // from the end: mostly it is near
            const auto latest = std::find_if(prompt.rbegin(), prompt.rend(), [&](std::int32_t token) {
                return (flags.of(token) & kMarks[m]) != 0;
            });
            since_[m] = static_cast<int>(latest - prompt.rbegin());
        }
    }

    // Appends output tokens.
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

    // Tokens after the latest occurrence of a mark; all tokens if there is none.
    int since(std::size_t mark) const { return since_[mark]; }

    // Share of the latest kWindow output tokens that are in a class.
    float share(int token_class) const {
        const auto num = std::clamp<std::size_t>(num_output_, 1, kWindow);
        return static_cast<float>(count_of(counts_, token_class)) / static_cast<float>(num);
    }

private:
    const TokenFlags* flags_;
    std::array<int, kNumMarks> since_;
    std::array<std::uint8_t, kWindow> window_{};  // a ring
    std::uint64_t counts_ = 0;                    // tokens in window_ by class
    std::size_t num_output_ = 0;
};

}  // namespace sglang_hvd
