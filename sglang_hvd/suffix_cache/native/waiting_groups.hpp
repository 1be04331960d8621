// The groups that may become nodes of a tree, the most probable first.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace sglang_hvd {

// A priority queue of group numbers below kCapacity with O(1) push and pop and few branches.
//
// Probabilities that differ by less than 1/64 count as equal, as do all below 2**-16. Of equal ones the
// latest comes first.
template <int kCapacity>
class WaitingGroups {
public:
    void clear() {
        words_ = {};
        used_words_ = 0;
    }
    bool is_empty() const { return used_words_ == 0; }

    // prob: from 0 to 1.
    void push(int group, float prob) {
        const int bucket = bucket_of(prob), word = bucket / 64, bit = bucket % 64;
        // kNone if the bucket is empty.
        const std::uint64_t is_empty = ~(words_[word] >> bit) & 1;
        next_[group] = static_cast<std::uint16_t>(heads_[bucket] | (0 - is_empty));
        heads_[bucket] = static_cast<std::uint16_t>(group);
        words_[word] |= std::uint64_t{1} << bit;
        used_words_ |= 1u << word;
    }

    // The queue must not be empty.
    int pop() {
        const int bucket = first_bucket(), word = bucket / 64;
        const int group = heads_[bucket];
        heads_[bucket] = next_[group];
        words_[word] &= ~(std::uint64_t{next_[group] == kNone} << bucket % 64);
        used_words_ &= ~(std::uint32_t{words_[word] == 0} << word);
        return group;
    }

    bool would_be_first(float prob) const {
        return is_empty() || bucket_of(prob) >= first_bucket();
    }

private:
    static constexpr std::uint16_t kNone = 0xFFFF;
    static_assert(kCapacity < kNone);

    // The leading bits of a float approximate its logarithm: here 16 octaves and 6 bits of the fraction.
    static constexpr int kFractionBits = 6;
    static constexpr int kNumBuckets = 16 << kFractionBits;
    static int bucket_of(float prob) {
        const auto log = std::bit_cast<std::uint32_t>(prob) >> (23 - kFractionBits);
        constexpr int kLogOfOne = 127 << kFractionBits;
        return std::clamp(static_cast<int>(log) - kLogOfOne + kNumBuckets - 1, 0, kNumBuckets - 1);
    }
    int first_bucket() const {
        const int word = static_cast<int>(std::bit_width(used_words_)) - 1;
        return 64 * word + static_cast<int>(std::bit_width(words_[word])) - 1;
    }

    std::uint32_t used_words_ = 0;
    std::array<std::uint64_t, kNumBuckets / 64> words_{};  // which buckets are not empty
    std::array<std::uint16_t, kNumBuckets> heads_;
    std::array<std::uint16_t, kCapacity> next_;
};

}  // namespace sglang_hvd
