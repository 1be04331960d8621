// Replay labels: how much of each draft the recorded continuation confirms.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace sglang_hvd {

// A row-major [num_drafts, width] matrix of token ids; only the first lengths[i] of row i count.
struct DraftMatrix {
    std::span<const std::int32_t> token_ids;
    std::span<const std::int32_t> lengths;
    std::size_t width;
};

namespace detail {

[[noreturn]] inline void reject(const std::string& what, std::size_t row, std::int64_t got,
                                std::size_t most) {
    throw std::invalid_argument(what + "[" + std::to_string(row) + "] is " + std::to_string(got) +
                                ": must lie in 0.." + std::to_string(most));
}

inline void require_rows(const std::string& what, std::size_t got, std::size_t want) {
    if (got != want) {
        throw std::invalid_argument(what + " has " + std::to_string(got) +
                                    " entries, draft_tokens has " + std::to_string(want) +
                                    " rows: pass one entry per draft");
    }
}

inline std::size_t checked_index(const std::string& what, std::size_t row, std::int64_t got,
                                 std::size_t most) {
    if (got < 0 || static_cast<std::uint64_t>(got) > most) reject(what, row, got, most);
    return static_cast<std::size_t>(got);
}

}  // namespace detail

// accepted[i] = longest common prefix of draft i and sequence[positions[i]:], in tokens.
//
// Under greedy decoding the target keeps exactly these tokens of the draft when the text before
// positions[i] is the prefix (paper, Appendix B). The bonus token is not counted.
// Throws std::invalid_argument if a length or position lies outside its array; accepted is then
// partly written.
inline void accepted_lengths(const DraftMatrix& drafts, std::span<const std::int64_t> positions,
                             std::span<const std::int32_t> sequence,
                             std::span<std::int32_t> accepted) {
    const std::size_t num_drafts = accepted.size();
    detail::require_rows("draft_lengths", drafts.lengths.size(), num_drafts);
    detail::require_rows("positions", positions.size(), num_drafts);
    for (std::size_t row = 0; row < num_drafts; ++row) {
        const std::size_t length =
            detail::checked_index("draft_lengths", row, drafts.lengths[row], drafts.width);
        const std::size_t position =
            detail::checked_index("positions", row, positions[row], sequence.size());
        const auto draft = drafts.token_ids.subspan(row * drafts.width, length);
        const auto continuation = sequence.subspan(position);
        const auto first_miss = std::mismatch(draft.begin(), draft.end(), continuation.begin(),
                                              continuation.end())
                                    .first;
        accepted[row] = static_cast<std::int32_t>(first_miss - draft.begin());
    }
}

}  // namespace sglang_hvd
