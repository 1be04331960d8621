// SuffixDecoding's draft, exactly: the baseline of the paper.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "token_text.hpp"

namespace sglang_hvd {

// Token for token and score for score what ArcticInference 0.3.0 proposes as a chain
// (csrc/suffix_decoding/suffix_tree.cc: speculate). matching.py is the same in Python and says why;
// here the occurrences come from a chain of the index. Time is linear in the number of
// occurrences of the last token, which suffices for a baseline.
struct PaperSettings {
    int max_depth = 64;
    int max_draft_tokens = 64;
    float max_spec_factor = 1.f;
    float max_spec_offset = 0.f;
    float min_token_prob = 0.1f;
};

struct PaperDraft {
    std::vector<Token> token_ids;
    std::vector<float> probs;
    int match_len = 0;
    float score = 0;
    std::size_t num_occurrences = 0, num_agreeing = 0;
};

namespace detail {

// The first child of a node of ArcticInference's suffix tree after these insertions: children
// stand by falling count; one that reaches a count goes behind the others with that count, except
// that the first of its old group goes before them (suffix_tree.cc: _increment_count).
inline Token first_sibling(std::span<const Token> tokens) {
    std::map<Token, std::size_t> counts;
    std::vector<std::vector<Token>> groups(1);  // children by count, in order
    for (const Token token : tokens) {
        std::size_t& count = counts[token];
        bool is_first = false;
        if (count > 0) {
            auto& old = groups[count];
            const auto at = std::find(old.begin(), old.end(), token);
            is_first = at == old.begin();
            old.erase(at);
        }
        ++count;
        if (count == groups.size()) groups.emplace_back();
        auto& group = groups[count];
        group.insert(is_first ? group.begin() : group.end(), token);
    }
    return groups.back().front();
}

}  // namespace detail

class PaperProposer {
public:
    explicit PaperProposer(const PaperSettings& settings)
        : max_depth_(settings.max_depth), min_prob_(settings.min_token_prob) {
        for (int match_len = 0; match_len < settings.max_depth; ++match_len) {
            // In single precision, with the epsilon in double, as upstream.
            const float room = static_cast<float>(match_len) * settings.max_spec_factor;
            const double limit = static_cast<double>(room + settings.max_spec_offset) + 1e-6;
            const int by_factor = limit <= 0 ? 0 : limit >= 1e6 ? 1'000'000 : static_cast<int>(limit);
            most_by_match_.push_back(std::min(
                {by_factor, settings.max_draft_tokens, settings.max_depth - match_len}));
        }
    }

    // The last tokens that a match may cover. The longest match leaves out the first token of the
    // request, and room for one draft token.
    std::vector<Token> context_of(const TokenText& own) const {
        const auto length = std::min<std::size_t>(own.size() == 0 ? 0 : own.size() - 1,
                                                  static_cast<std::size_t>(max_depth_ - 1));
        std::vector<Token> context;
        for (auto place = own.end() - static_cast<Position>(length); place < own.end(); ++place) {
            context.push_back(own.token(place));
        }
        return context;
    }

    // The continuation with the highest score over all match lengths; the longest match wins ties.
    std::optional<PaperDraft> propose(const TokenText& text, std::span<const Token> context,
                                      int max_tokens) const {
        if (context.empty() || text.size() == 0) return std::nullopt;
        find_matches(text, context);
        if (matches_.empty()) return std::nullopt;

        std::optional<PaperDraft> best;
        for (const auto& [most, shortest, longest] : ranges_by_promise(max_tokens)) {
            // All lengths in this range have the same occurrences, so the same continuation.
            if (most == 0 || (best && static_cast<float>(most) < best->score)) break;
            std::vector<Position> ends;
            for (const Match& match : matches_)
                if (match.length >= longest) ends.push_back(match.end);
            PaperDraft path = follow(text, std::move(ends), most);
            std::vector<float> scores = {0.f};
            for (const float prob : path.probs) scores.push_back(scores.back() + prob);
            std::size_t num_kept = 0;
            for (int length = shortest; length <= longest; ++length) {
                const auto num =
                    std::min(static_cast<std::size_t>(room(length, max_tokens)), path.probs.size());
                if (length == shortest || scores[num] >= path.score) {
                    path.score = scores[num];
                    path.match_len = length;
                    num_kept = num;
                }
            }
            if (path.score == 0) continue;
            if (!best || std::pair(path.score, path.match_len) >
                             std::pair(best->score, best->match_len)) {
                path.token_ids.resize(num_kept);
                path.probs.resize(num_kept);
                best = std::move(path);
            }
        }
        return best;
    }

private:
    struct Match {
        Position end;  // just after the match
        int length;
    };
    struct Range {
        int most, shortest, longest;
    };

    int room(int match_len, int max_tokens) const {
        return std::min(most_by_match_[static_cast<std::size_t>(match_len)], max_tokens);
    }

    void find_matches(const TokenText& text, std::span<const Token> context) const {
        matches_.clear();
        const int order = kNumOrders - 1;
        const Token* end = context.data() + context.size();
        for (auto at = text.latest(context_hash(end, order), order); at.is_found;
             at = text.previous(at.place, order)) {
            const auto most = std::min<std::size_t>(context.size(), at.place - text.begin() + 1);
            std::size_t length = 0;
            while (length < most &&
                   text.token(at.place - static_cast<Position>(length)) == end[-1 - static_cast<std::ptrdiff_t>(length)])
                ++length;
            if (length > 0) matches_.push_back({at.place + 1, static_cast<int>(length)});
        }
        std::reverse(matches_.begin(), matches_.end());
    }

    // Ranges of match lengths with equal occurrences, those that allow the longest draft first.
    std::vector<Range> ranges_by_promise(int max_tokens) const {
        std::vector<int> lengths;
        for (const Match& match : matches_) lengths.push_back(match.length);
        std::sort(lengths.begin(), lengths.end());
        lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
        std::vector<Range> ranges;
        int shortest = 1;
        for (const int longest : lengths) {
            int most = 0;
            for (int length = shortest; length <= longest; ++length)
                most = std::max(most, room(length, max_tokens));
            ranges.push_back({most, shortest, longest});
            shortest = longest + 1;
        }
        std::stable_sort(ranges.begin(), ranges.end(),
                         [](const Range& a, const Range& b) { return a.most > b.most; });
        return ranges;
    }

    // Follows the most frequent next token. A token's probability is the share of the occurrences
    // it follows, those that nothing follows included, times its predecessor's probability.
    PaperDraft follow(const TokenText& text, std::vector<Position> ends, int most) const {
        PaperDraft path;
        path.num_occurrences = ends.size();
        float prob = 1;
        std::vector<Token> next, sorted;
        while (path.token_ids.size() < static_cast<std::size_t>(most)) {
            next.clear();
            for (const Position end : ends)
                if (const Token token = text.token(end); token != kEnd) next.push_back(token);
            if (next.empty()) break;
            sorted = next;
            std::sort(sorted.begin(), sorted.end());
            std::size_t count = 0, num_leaders = 0;
            Token token = kEnd;
            for (auto at = sorted.begin(); at != sorted.end();) {
                const auto stop = std::upper_bound(at, sorted.end(), *at);
                const auto num = static_cast<std::size_t>(stop - at);
                if (num > count) {
                    count = num;
                    token = *at;
                    num_leaders = 0;
                }
                if (num == count) ++num_leaders;
                at = stop;
            }
            prob *= static_cast<float>(count) / static_cast<float>(ends.size());
            if (prob < min_prob_) break;
            // Takes time quadratic in the tokens that lead.
            if (num_leaders > 1) token = detail::first_sibling(next);
            if (path.token_ids.empty()) path.num_agreeing = count;
            path.token_ids.push_back(token);
            path.probs.push_back(prob);
            std::erase_if(ends, [&](Position end) { return text.token(end) != token; });
            for (Position& end : ends) ++end;
        }
        return path;
    }

    int max_depth_;
    float min_prob_;
    std::vector<int> most_by_match_;
    mutable std::vector<Match> matches_;
};

}  // namespace sglang_hvd
