// Evidence about a draft: whether its first tokens usually follow one another, and how similar the text
// before the draft is to the text before its source.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "draft_layout.hpp"
#include "token_text.hpp"

namespace sglang_hvd {

// Looks up the first tokens of a chain that follows the text. The lookups are interleaved, because each
// step waits for memory.
inline void look_up_tokens(const TokenText& text, std::span<const Token> draft,
                           DraftEvidence& evidence) {
    constexpr int kBefore = 2;
    constexpr int kPairs = kUnigram - 1;
    static_assert(kOrders[kPairs] == kBefore);
    constexpr int kMaxPairs = 2;   // latest places of a pair that are read
    constexpr int kMaxTokens = 4;  // latest places in a token's bucket that are read
    const int num = static_cast<int>(std::min<std::size_t>(draft.size(), kEvidenceDepth));
    std::array<Token, kBefore + kEvidenceDepth> tokens;
    tokens.fill(kEnd);
    const int num_before = static_cast<int>(std::min<std::size_t>(text.size(), kBefore));
    std::copy_n(text.at(text.end()) - num_before, num_before, tokens.data() + kBefore - num_before);
    std::copy_n(draft.data(), num, tokens.data() + kBefore);

    std::array<std::uint32_t, kEvidenceDepth> pair_hashes, token_hashes;
    for (int i = 0; i < num; ++i) {
        const Token* token = tokens.data() + kBefore + i;
        pair_hashes[i] = context_hash(token, kPairs);
        token_hashes[i] = context_hash(token + 1, kUnigram);
        text.prefetch_head(pair_hashes[i], kPairs);
        text.prefetch_head(token_hashes[i], kUnigram);
    }

    std::array<TokenText::Found, kEvidenceDepth> pairs;
    std::array<std::array<Position, kMaxTokens>, kEvidenceDepth> places;
    std::array<int, kEvidenceDepth> num_places;
    for (int i = 0; i < num; ++i) {
        pairs[i] = text.latest(pair_hashes[i], kPairs);
        // The draft itself follows the end of the text.
        if (pairs[i].is_found && pairs[i].place + 1 == text.end())
            pairs[i] = text.previous(pairs[i].place, kPairs);
        if (pairs[i].is_found) text.prefetch_place(pairs[i].place, kPairs);
        num_places[i] = text.recent(token_hashes[i], places[i]);
        for (int k = 0; k < num_places[i]; ++k)
            __builtin_prefetch(text.before_end(places[i][k]));  // only the token is read
    }

    for (int k = 0; k < kMaxPairs; ++k) {
        for (int i = 0; i < num; ++i) {
            if (!pairs[i].is_found) continue;
            const Token* token = tokens.data() + kBefore + i;
            const Token* here = text.before_end(pairs[i].place);
            const bool is_pair =
                pairs[i].place > text.begin() && here[0] == token[-1] && here[-1] == token[-2];
            if (is_pair) {
                ++evidence.num_seen[i];
                evidence.num_followed[i] += here[1] == *token;
            }
            if (k + 1 == kMaxPairs) continue;
            pairs[i] = text.previous(pairs[i].place, kPairs);
            if (pairs[i].is_found) text.prefetch_place(pairs[i].place, kPairs);
        }
    }
    for (int i = 0; i < num; ++i) {
        evidence.age[i] = kNeverSeen;
        for (int k = num_places[i] - 1; k >= 0; --k)
            if (*text.before_end(places[i][k]) == draft[i])
                evidence.age[i] =
                    std::min(kNeverSeen, static_cast<float>(text.end() - 1 - places[i][k]));
    }
}

// Compares the texts that end at `here` and `there`. num: tokens before both ends, at most kLookBack.
inline void compare_contexts(const Token* here, const Token* there, int num, DraftEvidence& evidence) {
    // The arrays have a fixed length for the compiler; values that no text holds fill them up.
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
