// What else the texts know of a draft: whether its first tokens usually follow one another, and how
// alike the text before it is to the text that it was copied from.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "token_text.hpp"

namespace sglang_hvd {

constexpr int kEvidenceDepth = 8;  // first tokens of a draft that are looked up

// By the draft's tokens. num_seen, num_followed: of the latest places of the two tokens before,
// those that were looked at, and those that the token followed there; age: tokens since the latest
// place of the token itself in the request's own text, kNeverSeen without one.
// What stands before the draft, against what stands before the place it was copied from: shares of
// the latest kLookBack tokens. aligned: the same at the same distance; in_common: at any distance.
struct DraftEvidence {
    std::array<float, kEvidenceDepth> num_seen_in_own{}, num_followed_in_own{};
    std::array<float, kEvidenceDepth> num_seen_in_shared{}, num_followed_in_shared{};
    std::array<float, kEvidenceDepth> age{};
    float aligned = 0, in_common = 0;
};
constexpr int kNumEvidence = sizeof(DraftEvidence) / sizeof(float);
constexpr float kNeverSeen = 65536;

namespace detail {

constexpr int kMostPlaces = 4;  // of two tokens, in each text

struct Followers {
    float num_seen = 0, num_followed = 0;
};

// Of the latest places of the pair before `next`; one that ends the text or a sequence says nothing.
inline Followers followers_of(const TokenText& text, const Token* next, std::uint32_t pair_hash) {
    constexpr int kPairs = kUnigram - 1;
    static_assert(kOrders[kPairs] == 2);
    Followers followers;
    TokenText::Found at = text.latest(pair_hash, kPairs);
    if (at.is_found && at.place + 1 == text.end()) at = text.previous(at.place, kPairs);
    for (int i = 0; i < kMostPlaces && at.is_found; ++i) {
        const Token* here = text.before_end(at.place);
        const bool is_pair = at.place > text.begin() && here[0] == next[-1] && here[-1] == next[-2];
        if (is_pair && here[1] != kEnd) {
            ++followers.num_seen;
            followers.num_followed += here[1] == next[0];
        }
        at = text.previous(at.place, kPairs);
    }
    return followers;
}

inline float age_of(const TokenText& text, const Token* token) {
    std::array<Position, TokenText::kNumRecent> places;
    const int num = text.recent(context_hash(token + 1, kUnigram), places);
    for (int i = 0; i < num; ++i) {
        if (*text.before_end(places[i]) == *token)
            return std::min(kNeverSeen, static_cast<float>(text.end() - 1 - places[i]));
    }
    return kNeverSeen;
}

}  // namespace detail

// Looks up the first tokens of a chain that follows `own`. shared: may be null.
inline void look_up_tokens(const TokenText& own, const TokenText* shared,
                           std::span<const Token> draft, DraftEvidence& evidence) {
    constexpr int kBefore = 2;
    const int num = static_cast<int>(std::min<std::size_t>(draft.size(), kEvidenceDepth));
    std::array<Token, kBefore + kEvidenceDepth> tokens;
    tokens.fill(kEnd);
    const int num_before = static_cast<int>(std::min<std::size_t>(own.size(), kBefore));
    std::copy_n(own.at(own.end()) - num_before, num_before, tokens.data() + kBefore - num_before);
    std::copy_n(draft.data(), num, tokens.data() + kBefore);
    std::array<std::uint32_t, kEvidenceDepth> hashes;
    for (int i = 0; i < num; ++i) {
        const Token* token = tokens.data() + kBefore + i;
        hashes[i] = context_hash(token, kUnigram - 1);
        own.prefetch_head(hashes[i], kUnigram - 1);
        if (shared) shared->prefetch_head(hashes[i], kUnigram - 1);
        own.prefetch_head(context_hash(token + 1, kUnigram), kUnigram);
    }
    for (int i = 0; i < num; ++i) {
        const Token* token = tokens.data() + kBefore + i;
        const auto in_own = detail::followers_of(own, token, hashes[i]);
        evidence.num_seen_in_own[i] = in_own.num_seen;
        evidence.num_followed_in_own[i] = in_own.num_followed;
        if (shared) {
            const auto in_shared = detail::followers_of(*shared, token, hashes[i]);
            evidence.num_seen_in_shared[i] = in_shared.num_seen;
            evidence.num_followed_in_shared[i] = in_shared.num_followed;
        }
        evidence.age[i] = detail::age_of(own, token);
    }
}

// here, there: ends of the two texts; num: tokens that stand before both, at most kLookBack.
inline void compare_contexts(const Token* here, const Token* there, int num, DraftEvidence& evidence) {
    int num_aligned = 0, num_common = 0;
    for (int i = 1; i <= num; ++i) {
        num_aligned += here[-i] == there[-i];
        bool is_common = false;
        for (int j = 1; j <= num; ++j) is_common |= here[-i] == there[-j];
        num_common += is_common;
    }
    evidence.aligned = static_cast<float>(num_aligned) / kLookBack;
    evidence.in_common = static_cast<float>(num_common) / kLookBack;
}

}  // namespace sglang_hvd
