// How much an earlier occurrence tells about the next token: constants fitted to recorded text.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "draft_layout.hpp"
#include "token_text.hpp"

namespace sglang_hvd {

// P(next = t) = sum of the weights of the occurrences followed by t
//               / (sum of all weights + weight of "none of them").
// An occurrence has the weight exp(of_length[match_len] + of_age[bucket] + of_origin). The constants
// maximise the likelihood of recorded outputs; see docs/experiments/suffix-cache.md.
class DraftWeights {
public:
    static const DraftWeights& get() {
        static const DraftWeights weights;
        return weights;
    }

    float of_match(int match_len) const { return match_[std::min(match_len, kLookBack)]; }
    float of_none(int longest_match) const { return none_[std::min(longest_match, kLookBack)]; }
    // Probability of the token after an occurrence if there is no other occurrence.
    float share_of(int match_len, float place_weight) const {
        return place_weight / (place_weight + none_by_match_[std::min(match_len, kLookBack)]);
    }
    // age: tokens between the occurrence and the end of its text.
    float of_place(Position age, MatchOrigin origin) const {
        return place_[static_cast<int>(origin)][age_bucket(age)];
    }

private:
    static constexpr int kNumBuckets = 12;
    static constexpr int kNumAges = 24;

#include "draft_weights.inc"

    // 0, 1-4, 5-8, ...: half powers of two of 1 + age / 16.
    static int age_bucket(Position age) {
        const std::uint64_t scaled = (std::uint64_t{age} + 16) * (std::uint64_t{age} + 16) / 256;
        return std::min(static_cast<int>(std::bit_width(scaled)) - 1, kNumAges - 1);
    }
    static int length_bucket(int length) {
        if (length < 6) return length;
        if (length < 8) return 6;
        if (length < 12) return 7;
        if (length < 16) return 8;
        if (length < 24) return 9;
        return length < 32 ? 10 : 11;
    }

    DraftWeights() {
        for (int length = 0; length <= kLookBack; ++length) {
            match_[length] = std::exp(kOfLength[length_bucket(length)]);
            none_[length] = std::exp(kOfNone[length_bucket(length)]);
            none_by_match_[length] = none_[length] / match_[length];
        }
        for (int origin = 0; origin < kNumOrigins; ++origin) {
            for (int age = 0; age < kNumAges; ++age) {
                place_[origin][age] = std::exp(kOfAge[age] + kOfOrigin[origin]);
            }
        }
    }

    std::array<float, kLookBack + 1> match_, none_, none_by_match_;
    std::array<std::array<float, kNumAges>, kNumOrigins> place_;
};

}  // namespace sglang_hvd
