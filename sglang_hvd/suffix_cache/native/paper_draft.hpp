// SuffixDecoding's draft, exactly: the paper's baseline.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "followers.hpp"
#include "token_table.hpp"
#include "token_text.hpp"

namespace sglang_hvd {

// Proposes, token for token and score for score, what ArcticInference 0.3.0 proposes as a chain
// (csrc/suffix_decoding/suffix_tree.cc: speculate). tests/suffix_cache/oracle/matching.py is the same in
// Python and explains it. Here the occurrences come from a chain of the index. The time is linear in the
// number of occurrences of the last token, which suffices for a baseline. A text of few different tokens
// cannot raise the factor much: an occurrence is compared once with the context and about once with the
// draft, not once for each match length and each token of the draft.
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

// The first child of a node of ArcticInference's suffix tree after these insertions. Children stand by
// falling count. A child that reaches a count goes after the others with that count, except that the
// first child of its old group goes before them (suffix_tree.cc: _increment_count).
inline Token first_sibling(std::span<const Token> tokens) {
    struct Child {
        Token token = kEnd;
        std::size_t count = 0;
        std::uint32_t before = 0, after = 0;  // in its group; 0: none
    };
    std::vector<Child> children(1);
    struct Group {
        std::uint32_t first = 0, last = 0;
    };
    std::vector<Group> groups(1);  // children by count, linked in order
    TokenTable child_of;
    child_of.clear(tokens.size());
    for (const Token token : tokens) {
        std::uint32_t& which = child_of[token];
        if (which == 0) {
            which = static_cast<std::uint32_t>(children.size());
            children.push_back({.token = token});
        }
        Child& child = children[which];
        Group& old = groups[child.count];
        const bool is_first = child.count > 0 && old.first == which;
        if (child.count > 0) {
            (child.before == 0 ? old.first : children[child.before].after) = child.after;
            (child.after == 0 ? old.last : children[child.after].before) = child.before;
        }
        if (++child.count == groups.size()) groups.emplace_back();
        Group& group = groups[child.count];
        child.before = is_first ? 0 : group.last;
        child.after = is_first ? group.first : 0;
        (child.before == 0 ? group.first : children[child.before].after) = which;
        (child.after == 0 ? group.last : children[child.after].before) = which;
    }
    return children[groups.back().first].token;
}

}  // namespace detail

class PaperProposer {
public:
    // The last tokens that a match may cover. The longest match excludes the first token of the request
    // and leaves room for one draft token.
    static std::vector<Token> context_of(const PaperSettings& settings, const TokenText& own) {
        const auto length = std::min<std::size_t>(own.size() == 0 ? 0 : own.size() - 1,
                                                  static_cast<std::size_t>(settings.max_depth - 1));
        std::vector<Token> context(length);
        own.copy(own.end() - static_cast<Position>(length), context);
        return context;
    }

    // The continuation with the highest score over all match lengths; the longest match wins ties.
    std::optional<PaperDraft> propose(const PaperSettings& settings, const TokenText& text,
                                      std::span<const Token> context, int max_tokens) {
        if (context.empty() || text.size() == 0 || max_tokens <= 0) return std::nullopt;
        settings_ = settings;
        settings_.max_draft_tokens = std::min(settings.max_draft_tokens, max_tokens);
        find_matches(text, context);
        const std::vector<Range> ranges = ranges_of_matches();
        if (ranges.empty() || ranges.front().max_from_here <= 0) return std::nullopt;
        const auto longest_draft = static_cast<std::size_t>(ranges.front().max_from_here);

        // The longest matches come first: every shorter one has their occurrences and its own.
        std::optional<PaperDraft> best;
        all_.clear();
        std::size_t num_lost = 0;  // occurrences compared again, because the draft left the guide
        for (const Range& range : ranges) {
            if (best && static_cast<float>(range.max_from_here) < best->score) break;
            if (range.max == 0 || (best && static_cast<float>(range.max) < best->score)) continue;
            all_.add(std::span(ends_).subspan(all_.size(), range.num_ends - all_.size()));
            all_.compare(text, longest_draft);
            auto [path, survivor] = follow(text, longest_draft, num_lost);
            if (num_lost >= all_.size()) {  // comparing all again costs no more than that did
                num_lost = 0;
                all_.guide_by(text, survivor, longest_draft);
            }
            std::vector<float> scores = {0.f};
            for (const float prob : path.probs) scores.push_back(scores.back() + prob);
            std::size_t num_kept = 0;
            for (int length = range.shortest; length <= range.longest; ++length) {
                const auto num = std::min(static_cast<std::size_t>(room(length)), path.probs.size());
                if (length == range.shortest || scores[num] >= path.score) {
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
        if (ends_.capacity() > kMaxKept) *this = {};
        return best;
    }

private:
    // Memory for this many occurrences is kept for the next proposal: 30 to 70 bytes each.
    static constexpr std::size_t kMaxKept = std::size_t{1} << 18;

    struct Match {
        Position end;  // just after the match
        std::uint32_t length;
    };
    // Match lengths with the same occurrences (the first num_ends of ends_), so the same continuation.
    struct Range {
        int shortest, longest;
        std::size_t num_ends;
        int max;            // tokens of a draft
        int max_from_here;  // the same for this range and all shorter matches
    };

    // The maximum number of draft tokens for this match length.
    int room(int match_len) const {
        // In single precision, with the epsilon in double, as upstream.
        const float by_factor = static_cast<float>(match_len) * settings_.max_spec_factor;
        const double limit = static_cast<double>(by_factor + settings_.max_spec_offset) + 1e-6;
        const int max = std::min(settings_.max_draft_tokens, settings_.max_depth - match_len);
        return limit <= 0 || max <= 0 ? 0 : limit >= max ? max : static_cast<int>(limit);
    }

    // Fills ends_. If a match overlaps a later one, the context's agreement with itself tells its length,
    // as in the Z algorithm: no token of the text is found to agree twice.
    void find_matches(const TokenText& text, std::span<const Token> context) {
        matches_.clear();
        num_matches_.assign(context.size() + 1, 0);
        overlaps_.assign(context.size(), kUnknown);
        const Token* context_end = context.data() + context.size();
        Match first{0, 0};  // the match so far that begins first
        for (auto at = text.latest(context_hash(context_end, kUnigram), kUnigram); at.is_found;
             at = text.previous(at.place, kUnigram)) {
            const Position end = at.place + 1, shift = first.end - end;
            std::uint32_t length = 0;
            bool is_known = false;
            if (shift < first.length) {
                if (overlaps_[shift] == kUnknown) overlaps_[shift] = overlap_of(context, shift);
                length = std::min(overlaps_[shift], first.length - shift);
                is_known = length < first.length - shift;
            }
            const auto max = std::min<std::size_t>(context.size(), end - text.begin());
            while (!is_known && length < max) {
                const int piece = static_cast<int>(std::min<std::size_t>(kLookBack, max - length));
                const int num = common_suffix(text.before_end(at.place - length) + 1,
                                              context_end - length, piece);
                length += static_cast<std::uint32_t>(num);
                is_known = num < piece;
            }
            if (length == 0) continue;  // another token in the same bucket
            matches_.push_back({end, length});
            ++num_matches_[length];
            if (first.length == 0 || end - length < first.end - first.length) first = {end, length};
        }

        ends_.resize(matches_.size());
        std::size_t num = matches_.size();
        next_.resize(num_matches_.size());  // where the next end of each length goes
        for (std::size_t length = 0; length < num_matches_.size(); ++length) {
            num -= num_matches_[length];
            next_[length] = num;
        }
        for (const Match& match : matches_) ends_[next_[match.length]++] = match.end;
    }

    // For how many tokens the context agrees with itself when it is shifted.
    static std::uint32_t overlap_of(std::span<const Token> context, std::size_t shift) {
        const auto rest = context.first(context.size() - shift);
        const auto differs = std::mismatch(rest.rbegin(), rest.rend(), context.rbegin()).first;
        return static_cast<std::uint32_t>(differs - rest.rbegin());
    }

    // Ranges of match lengths, the longest first.
    std::vector<Range> ranges_of_matches() const {
        std::vector<Range> ranges;
        std::size_t num_ends = 0;
        for (std::size_t length = num_matches_.size(); length-- > 1;) {
            if (num_matches_[length] > 0) {
                num_ends += num_matches_[length];
                ranges.push_back({0, static_cast<int>(length), num_ends, 0, 0});
            }
            if (ranges.empty()) continue;
            Range& range = ranges.back();
            range.shortest = static_cast<int>(length);
            range.max = std::max(range.max, room(range.shortest));
        }
        int max = 0;
        for (auto range = ranges.rbegin(); range != ranges.rend(); ++range) {
            range->max_from_here = max = std::max(max, range->max);
        }
        return ranges;
    }

    // Follows the most frequent next token. A token's probability is the share of occurrences that it
    // follows, including those that nothing follows, times its predecessor's probability. Also returns
    // one of all_ that agrees with the draft. Adds the occurrences that had to be compared again to
    // num_lost.
    std::pair<PaperDraft, Position> follow(const TokenText& text, std::size_t longest_draft,
                                           std::size_t& num_lost) {
        PaperDraft path;
        path.num_occurrences = all_.size();
        const Followers* among = &all_;
        std::size_t num_alive = all_.size();  // occurrences that follow the draft so far
        std::size_t depth = 0;                // how many of its latest tokens are the guide's
        float prob = 1;
        while (path.token_ids.size() < longest_draft) {
            Leader leader = leader_of(text, *among, depth, num_alive);
            if (leader.count == 0) break;
            prob *= static_cast<float>(leader.count) / static_cast<float>(num_alive);
            if (prob < settings_.min_token_prob) break;
            if (leader.is_tied) leader.token = first_of_tied(text, *among, depth);
            if (path.token_ids.empty()) path.num_agreeing = leader.count;
            path.token_ids.push_back(leader.token);
            path.probs.push_back(prob);
            num_alive = leader.count;
            if (depth < among->guide().size() && leader.token == among->guide()[depth]) {
                ++depth;
                continue;
            }
            leavers_.clear();
            among->visit_leaving(depth, [&](Position place) {
                place += static_cast<Position>(depth);
                if (text.token(place) == leader.token) leavers_.push_back(place + 1);
            });
            Followers& leaving = among == &leaving_[0] ? leaving_[1] : leaving_[0];
            leaving.clear();
            leaving.add(leavers_);
            leaving.compare(text, longest_draft - path.token_ids.size());
            num_lost += leaving.size();
            among = &leaving;
            depth = 0;
        }
        const std::size_t num_before = path.token_ids.size() - depth;
        while (among->num_leaving(depth) == 0) ++depth;
        return {std::move(path), among->one_leaving(depth) - static_cast<Position>(num_before)};
    }

    struct Leader {
        Token token = kEnd;
        std::size_t count = 0;
        bool is_tied = false;
    };

    // The most frequent token after the places that agree with the guide for at least depth tokens.
    Leader leader_of(const TokenText& text, const Followers& among, std::size_t depth,
                     std::size_t num_alive) {
        const std::size_t num_leaving = among.num_leaving(depth);
        Leader leader;
        if (num_leaving < num_alive) leader = {among.guide()[depth], num_alive - num_leaving, false};
        if (leader.count > num_leaving) return leader;
        counts_.clear(num_leaving);
        among.visit_leaving(depth, [&](Position place) {
            const Token token = text.token(place + static_cast<Position>(depth));
            if (token == kEnd) return;
            const std::size_t count = ++counts_[token];
            if (count > leader.count) {
                leader = {token, count, false};
            } else if (count == leader.count) {
                leader.is_tied = true;
            }
        });
        return leader;
    }

    Token first_of_tied(const TokenText& text, const Followers& among, std::size_t depth) {
        std::vector<Position> places;
        for (std::size_t agreeing = depth; agreeing <= among.guide().size(); ++agreeing) {
            among.visit_leaving(agreeing, [&](Position place) {
                places.push_back(place + static_cast<Position>(depth));
            });
        }
        std::sort(places.begin(), places.end());  // upstream inserted them in this order
        std::vector<Token> tokens;
        for (const Position place : places) {
            if (const Token token = text.token(place); token != kEnd) tokens.push_back(token);
        }
        return detail::first_sibling(tokens);
    }

    static constexpr std::uint32_t kUnknown = ~std::uint32_t{0};

    PaperSettings settings_;

    // Of the latest proposal.
    std::vector<Match> matches_;  // the latest first
    std::vector<std::size_t> num_matches_;  // by length
    std::vector<std::uint32_t> overlaps_;   // of the context with itself, by shift
    std::vector<std::size_t> next_;
    std::vector<Position> ends_;  // places after a match, the longest match first
    Followers all_;               // the places that matter so far
    std::array<Followers, 2> leaving_;
    std::vector<Position> leavers_;
    TokenTable counts_;
};

}  // namespace sglang_hvd
