// The columns in which the suffix cache describes a draft and payoff reads it. types.py has the same columns;
// tests/test_types.py compares them.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace sglang_hvd {

// The place of a draft's longest match: the request's prompt, its own output, or finished requests.
enum class MatchOrigin : std::uint8_t { kPrompt, kOutput, kShared };
constexpr int kNumOrigins = 3;

// A row of DraftBatch.matches: the match that a draft was found by.
struct Match {
    float match_len = 0;        // longest match among the occurrences of the first draft token
    float score = 0;            // sum of the nodes' probabilities: expected accepted tokens
    float num_tokens = 0;       // nodes of the draft
    float origin = 0;           // MatchOrigin of that longest match
    float age = 0;              // tokens between that match and the end of its text
    float num_occurrences = 0;  // occurrences of the context that were found
    float num_agreeing = 0;     // of them, followed by the first draft token
    float agreement = 0;        // their share of the votes
    float mean_agreement = 0;   // the same share, mean over the draft's nodes

    bool is_from(MatchOrigin where) const { return origin == static_cast<float>(where); }
};
constexpr int kMatchColumns = sizeof(Match) / sizeof(float);

constexpr int kEvidenceDepth = 4;  // first tokens of a draft that are looked up

// A row of DraftBatch.evidence: further evidence about a draft from the texts.
// By token, all in the request's own text, which is one sequence:
//   num_seen: the latest places in the bucket of the two tokens before it, at which these two tokens stand and
//   are followed by something.
//   num_followed: the places among them at which the token follows.
//   age: tokens since the latest place of the token itself, kNeverSeen if it is not among the latest places in
//   its bucket.
// By token, of the votes at the place where the chain continues with it:
//   num_others: other tokens that have votes.
//   other: estimated probability that the likeliest of them follows if all before it is right.
// aligned, in_common: shares of the latest tokens before the draft that also stand before the place that it was
// copied from, at the same distance and at any distance. Before the start of a finished output stands the end of
// the output that finished before it.
// All are 0 without a draft, and all but the first three in the paper's draft, which names no place and no other
// tokens.
struct DraftEvidence {
    std::array<float, kEvidenceDepth> num_seen{}, num_followed{}, age{}, num_others{}, other{};
    float aligned = 0, in_common = 0;
};
constexpr int kEvidenceColumns = sizeof(DraftEvidence) / sizeof(float);
constexpr float kNeverSeen = 65536;

// A Match or DraftEvidence from its row.
template <class Row>
Row read_row(const float* columns) {
    std::array<float, sizeof(Row) / sizeof(float)> values;
    std::copy_n(columns, values.size(), values.begin());
    return std::bit_cast<Row>(values);
}

// The arrays of a DraftBatch (types.py). Row i belongs to request i.
struct DraftRows {
    std::size_t width = 0;  // entries of a row of the first four
    std::int32_t *token_ids = nullptr, *parents = nullptr, *depths = nullptr;
    float* probs = nullptr;
    std::int32_t* num_nodes = nullptr;
    float *matches = nullptr, *evidence = nullptr;

    std::size_t length(std::size_t row) const { return static_cast<std::size_t>(num_nodes[row]); }

    // The nodes of a row. values: one of the first four arrays.
    template <typename T>
    std::span<const T> nodes(const T* values, std::size_t row) const {
        return {values + row * width, length(row)};
    }
    std::span<const std::int32_t> tokens(std::size_t row) const { return nodes(token_ids, row); }

    Match match(std::size_t row) const { return read_row<Match>(matches + row * kMatchColumns); }
};

// Names of the fields with the columns at which they start.
struct Column {
    const char* name;
    std::size_t place;
};
#define COLUMN(row, name) Column{#name, offsetof(row, name) / sizeof(float)}
inline constexpr std::array<Column, kMatchColumns> kMatchNames = {
    COLUMN(Match, match_len),    COLUMN(Match, score),           COLUMN(Match, num_tokens),
    COLUMN(Match, origin),       COLUMN(Match, age),             COLUMN(Match, num_occurrences),
    COLUMN(Match, num_agreeing), COLUMN(Match, agreement),       COLUMN(Match, mean_agreement),
};
inline constexpr std::array kEvidenceNames = {
    COLUMN(DraftEvidence, num_seen),   COLUMN(DraftEvidence, num_followed), COLUMN(DraftEvidence, age),
    COLUMN(DraftEvidence, num_others), COLUMN(DraftEvidence, other),
    COLUMN(DraftEvidence, aligned),    COLUMN(DraftEvidence, in_common),
};
#undef COLUMN
constexpr std::size_t kOriginColumn = offsetof(Match, origin) / sizeof(float);

}  // namespace sglang_hvd
