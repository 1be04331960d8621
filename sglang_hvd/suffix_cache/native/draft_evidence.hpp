// What else the texts know of a draft: whether its first tokens usually follow one another, and how
// alike the text before it is to the text that it was copied from.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "token_text.hpp"

namespace sglang_hvd {

constexpr int kEvidenceDepth = 8;  // first tokens of a draft that are looked up

// By the draft's tokens. num_seen, num_followed: of the latest places in the bucket of the two tokens
// before, those where these stand and something follows, and those where the token follows; age:
// tokens since the latest place of the token itself in the request's own text, kNeverSeen where its
// bucket does not hold one any more.
// What stands before the draft, against what stands before the place it was copied from: shares of
// the latest kLookBack tokens. aligned: the same at the same distance; in_common: at any distance.
// Before the beginning of a finished output stands the end of the one that finished before it.
// All are 0 without a draft, aligned and in_common in the paper's too, which names no place.
struct DraftEvidence {
    std::array<float, kEvidenceDepth> num_seen_in_own{}, num_followed_in_own{};
    std::array<float, kEvidenceDepth> num_seen_in_shared{}, num_followed_in_shared{};
    std::array<float, kEvidenceDepth> age{};
    float aligned = 0, in_common = 0;
};
constexpr int kNumEvidence = sizeof(DraftEvidence) / sizeof(float);
constexpr float kNeverSeen = 65536;

namespace detail {

constexpr int kMostPlaces = 4;  // in a bucket, in each text
constexpr int kPairs = kUnigram - 1;
static_assert(kOrders[kPairs] == 2);

// The latest places of the two tokens before `token` in one text, one after the other.
struct Followers {
    const TokenText* text;
    const Token* token;
    float *num_seen, *num_followed;
    TokenText::Found at;

    void prefetch() const {
        if (at.is_found) text->prefetch_place(at.place, kPairs);
    }
    // One that ends the text or a sequence says nothing.
    void take_place() {
        if (!at.is_found) return;
        const Token* here = text->before_end(at.place);
        const bool is_pair = at.place > text->begin() && here[0] == token[-1] && here[-1] == token[-2];
        if (is_pair && here[1] != kEnd) {
            ++*num_seen;
            *num_followed += here[1] == *token;
        }
        at = text->previous(at.place, kPairs);
        prefetch();
    }
};

// Where a text had a token last: its latest places of what is in the token's bucket.
struct LatestPlaces {
    static constexpr int kFirst = 4;  // mostly one of these is the token's

    std::array<Position, TokenText::kNumRecent> places;
    int num = 0;

    void prefetch(const TokenText& text, int first, int end) const {
        for (int i = first; i < std::min(end, num); ++i)
            __builtin_prefetch(text.before_end(places[i]));  // its links are not followed
    }
    float age_of(const TokenText& text, Token token, int first, int end) const {
        for (int i = first; i < std::min(end, num); ++i)
            if (*text.before_end(places[i]) == token)
                return std::min(kNeverSeen, static_cast<float>(text.end() - 1 - places[i]));
        return kNeverSeen;
    }
};

}  // namespace detail

// Looks up the first tokens of a chain that follows `own`, side by side: each step waits for memory.
// shared: may be null.
inline void look_up_tokens(const TokenText& own, const TokenText* shared,
                           std::span<const Token> draft, DraftEvidence& evidence) {
    using detail::kPairs, detail::LatestPlaces;
    constexpr int kBefore = 2;
    const int num = static_cast<int>(std::min<std::size_t>(draft.size(), kEvidenceDepth));
    std::array<Token, kBefore + kEvidenceDepth> tokens;
    tokens.fill(kEnd);
    const int num_before = static_cast<int>(std::min<std::size_t>(own.size(), kBefore));
    std::copy_n(own.at(own.end()) - num_before, num_before, tokens.data() + kBefore - num_before);
    std::copy_n(draft.data(), num, tokens.data() + kBefore);

    std::array<std::uint32_t, kEvidenceDepth> pair_hashes, token_hashes;
    for (int i = 0; i < num; ++i) {
        const Token* token = tokens.data() + kBefore + i;
        pair_hashes[i] = context_hash(token, kPairs);
        token_hashes[i] = context_hash(token + 1, kUnigram);
        own.prefetch_head(pair_hashes[i], kPairs);
        own.prefetch_head(token_hashes[i], kUnigram);
        if (shared) shared->prefetch_head(pair_hashes[i], kPairs);
    }

    std::array<detail::Followers, 2 * kEvidenceDepth> followers;
    int num_followers = 0;
    std::array<LatestPlaces, kEvidenceDepth> latest;
    for (int i = 0; i < num; ++i) {
        const Token* token = tokens.data() + kBefore + i;
        auto at = own.latest(pair_hashes[i], kPairs);
        if (at.is_found && at.place + 1 == own.end()) at = own.previous(at.place, kPairs);
        followers[num_followers++] = {&own, token, &evidence.num_seen_in_own[i],
                                      &evidence.num_followed_in_own[i], at};
        if (shared) {
            followers[num_followers++] = {shared, token, &evidence.num_seen_in_shared[i],
                                          &evidence.num_followed_in_shared[i],
                                          shared->latest(pair_hashes[i], kPairs)};
        }
        latest[i].num = own.recent(token_hashes[i], latest[i].places);
        latest[i].prefetch(own, 0, LatestPlaces::kFirst);
    }
    for (int f = 0; f < num_followers; ++f) followers[f].prefetch();

    for (int i = 0; i < num; ++i) {
        evidence.age[i] = latest[i].age_of(own, draft[i], 0, LatestPlaces::kFirst);
        if (evidence.age[i] == kNeverSeen)
            latest[i].prefetch(own, LatestPlaces::kFirst, TokenText::kNumRecent);
    }
    for (int place = 0; place < detail::kMostPlaces; ++place)
        for (int f = 0; f < num_followers; ++f) followers[f].take_place();
    for (int i = 0; i < num; ++i) {
        if (evidence.age[i] == kNeverSeen)
            evidence.age[i] =
                latest[i].age_of(own, draft[i], LatestPlaces::kFirst, TokenText::kNumRecent);
    }
}

// here, there: ends of the two texts; num: tokens that stand before both, at most kLookBack.
inline void compare_contexts(const Token* here, const Token* there, int num, DraftEvidence& evidence) {
    // Of a fixed length, for the compiler: filled up with what no text holds.
    std::array<Token, kLookBack> a, b;
    a.fill(kEnd - 1);
    b.fill(kEnd - 2);
    std::copy_n(here - num, num, a.data());
    std::copy_n(there - num, num, b.data());
    int num_aligned = 0, num_common = 0;
    for (int i = 0; i < kLookBack; ++i) num_aligned += a[i] == b[i];
    for (int i = 0; i < kLookBack; ++i) {
        int num_equal = 0;
        for (int j = 0; j < kLookBack; ++j) num_equal += a[i] == b[j];
        num_common += num_equal > 0;
    }
    evidence.aligned = static_cast<float>(num_aligned) / kLookBack;
    evidence.in_common = static_cast<float>(num_common) / kLookBack;
}

}  // namespace sglang_hvd
