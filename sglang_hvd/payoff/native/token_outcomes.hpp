// Counts how often drafts had tokens right: for each token, and for each pair of a token and the one before it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sglang_hvd {

// A table of fixed size, in which frequent entries displace rare ones. Equal calls leave equal tables, so ranks
// that commit the same tokens agree.
class TokenOutcomes {
public:
    // num_entries: a power of two. An entry takes 4 bytes.
    explicit TokenOutcomes(std::size_t num_entries) : entries_(num_entries) {}

    // scope: counts of different scopes are separate.
    void add(std::uint64_t scope, std::int32_t before, std::int32_t token, bool is_right) {
        count(hash_of(scope, kAny, token), is_right);
        count(hash_of(scope, before, token), is_right);
    }

    // Probabilities that a draft that follows `before` has each of its first tokens right, if it has all
    // earlier ones right. The share of the pair is drawn to that of the token, which is drawn to kPrior.
    // Results past the end of the draft are unspecified.
    template <std::size_t kNum>
    std::array<float, kNum> probs(std::uint64_t scope, std::int32_t before,
                                  std::span<const std::int32_t> draft) const {
        // Each lookup waits for memory. Computing all places first, without branches, overlaps the waits.
        std::array<std::uint64_t, 2 * kNum> hashes;
        for (std::size_t i = 0; i < kNum; ++i) {
            const std::int32_t token = i < draft.size() ? draft[i] : kAny;
            hashes[i] = hash_of(scope, kAny, token);
            hashes[kNum + i] = hash_of(scope, before, token);
            before = token;
        }
        std::array<float, 2 * kNum> right, wrong;
        for (std::size_t i = 0; i < 2 * kNum; ++i) {
            const Entry entry = entries_[place_of(hashes[i])];
            const bool is_known = entry.tag == tag_of(hashes[i]);
            right[i] = static_cast<float>(is_known ? entry.right : 0);
            wrong[i] = static_cast<float>(is_known ? entry.wrong : 0);
        }
        std::array<float, kNum> probs;
        for (std::size_t i = 0; i < kNum; ++i) {
            const float of_token =
                (right[i] + kPrior * kPriorWeight) / (right[i] + wrong[i] + kPriorWeight);
            const std::size_t both = kNum + i;
            const float of_both =
                (right[both] + of_token * kTokenWeight) / (right[both] + wrong[both] + kTokenWeight);
            probs[i] = std::clamp(of_both, 0.01f, 0.99f);
        }
        return probs;
    }

    void clear() { std::fill(entries_.begin(), entries_.end(), Entry{}); }

private:
    struct Entry {
        std::uint16_t tag = 0;
        std::uint8_t right = 0, wrong = 0;
    };
    static constexpr std::int32_t kAny = -2;  // counts the token after any other; -1 means none
    static constexpr float kPrior = 0.75f, kPriorWeight = 3, kTokenWeight = 2;
    static constexpr int kMaxCount = 255;

    static std::uint64_t hash_of(std::uint64_t scope, std::int32_t before, std::int32_t token) {
        std::uint64_t h = (std::uint64_t{static_cast<std::uint32_t>(before)} << 32 |
                           static_cast<std::uint32_t>(token)) ^ scope;
        h = (h ^ h >> 32) * 0x9E3779B97F4A7C15u;
        return (h ^ h >> 29) * 0xC2B2AE3D27D4EB4Fu;
    }
    static std::uint16_t tag_of(std::uint64_t hash) { return static_cast<std::uint16_t>(hash >> 48); }
    std::size_t place_of(std::uint64_t hash) const { return hash >> 16 & (entries_.size() - 1); }

    void count(std::uint64_t hash, bool is_right) {
        Entry& entry = entries_[place_of(hash)];
        if (entry.tag != tag_of(hash)) {
            if (entry.right + entry.wrong > 1) {  // it stays, weakened
                --(entry.right >= entry.wrong ? entry.right : entry.wrong);
                return;
            }
            entry = {tag_of(hash), 0, 0};
        }
        if (entry.right + entry.wrong == kMaxCount) {
            entry.right /= 2;
            entry.wrong /= 2;
        }
        ++(is_right ? entry.right : entry.wrong);
    }

    std::vector<Entry> entries_;
};

}  // namespace sglang_hvd
