// Drafts by vote: every earlier occurrence of the latest tokens votes for what followed it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>

#include "draft_evidence.hpp"
#include "draft_layout.hpp"
#include "draft_weights.hpp"
#include "token_text.hpp"
#include "waiting_groups.hpp"

namespace sglang_hvd {

constexpr int kMaxNodes = 256;

// A draft in the order in which it grew: parents stand before their children.
struct Draft {
    std::span<Token> token_ids;
    std::span<std::int32_t> parents;  // index of the previous node; -1: the context
    std::span<std::int32_t> depths;   // 1 for the tokens that may come next
    std::span<float> probs;           // estimated probability that the node is accepted
    int num_nodes = 0;
    Match match;
    DraftEvidence evidence;  // of a chain, on request
};

enum class DraftShape : std::uint8_t { kChain, kTree };

// Makes one draft at a time. It is a reusable workspace and allocates nothing.
class VotesProposer {
public:
    // The texts to search: the request's own, which ends with the context, and the shared one or null.
    struct Sources {
        const TokenText* own;
        Position prompt_end;
        const TokenText* shared;
    };

    // Fills draft with at most max_nodes nodes, at most kLookAhead deep.
    void propose(const Sources& sources, DraftShape shape, int max_nodes, float min_prob,
                 Draft& draft) {
        draft.num_nodes = 0;
        draft.match = {};
        if (max_nodes <= 0 || sources.own->size() == 0) return;
        sources_ = sources;
        draft_ = &draft;
        max_nodes_ = std::min(max_nodes, kMaxNodes);
        min_prob_ = min_prob;
        num_occurrences_ = num_members_ = num_groups_ = 0;
        others_ = {};
        look_up_context(shape == DraftShape::kChain ? kChainPlaces : kTreePlaces);
        if (num_occurrences_ == 0) return;
        node_ = {kEnd, -1, 0, 1.f, 0, static_cast<std::uint16_t>(num_occurrences_), 1.f};
        index_ = -1;
        std::iota(members_.begin(), members_.begin() + num_occurrences_, std::uint16_t{0});
        num_members_ = num_first_votes_ = num_occurrences_;
        if (shape == DraftShape::kChain) {
            grow_chain();
        } else {
            num_rematches_left_ = std::min(max_nodes_ / kNodesPerRematch, kMaxRematches);
            grow_tree();
        }
        draft.match.num_tokens = static_cast<float>(draft.num_nodes);
        if (draft.num_nodes > 0) draft.match.mean_agreement /= draft.match.num_tokens;
    }

    // Compares the text before the latest draft with that before its source. The draft must have nodes.
    void compare_with_source(DraftEvidence& evidence) const {
        const TokenText& own = *sources_.own;
        const TokenText& text = source_.origin == MatchOrigin::kShared ? *sources_.shared : own;
        const Position num_there = text.end() - source_.age - text.begin();
        const int num = std::min(context_len_, static_cast<int>(std::min<Position>(num_there, kLookBack)));
        compare_contexts(own.at(own.end()), source_.next, num, evidence);
    }

    // Tells which other tokens had votes at the first places of the latest chain.
    void tell_others(DraftEvidence& evidence) const {
        for (std::size_t i = 0; i < others_.size(); ++i) {
            evidence.num_others[i] = static_cast<float>(others_[i].count);
            evidence.other[i] = others_[i].prob;
        }
    }

private:
    static constexpr int kMaxOccurrences = 192;
    static constexpr int kMaxMembers = 1 << 13;
    static constexpr int kMaxGroups = 1 << 12;
    // How many of the latest places are read per order and text: for the context of a chain, for that of
    // a tree (which has room for less likely tokens), and for a drafted context.
    using MaxPlaces = std::array<int, kNumOrders>;
    static constexpr MaxPlaces kChainPlaces = {2, 5, 10};
    static constexpr MaxPlaces kTreePlaces = {2, 12, TokenText::kNumRecent};
    static constexpr MaxPlaces kRematchPlaces = {0, 4, 4};
    static constexpr int kNodesPerRematch = 11;
    static constexpr int kMaxRematches = 8;

    struct Occurrence {
        const Token* next;       // the tokens after it
        std::uint16_t num_next;  // how many of them can be read
        std::uint8_t match_len;
        std::uint8_t depth;  // depth of the node whose context it matches
        MatchOrigin origin;
        Position age;
        float place_weight;
    };

    // A possible node: the occurrences that lead to it are members_[first, first + count).
    struct Group {
        Token token;
        std::int32_t parent;
        std::int32_t depth;
        float prob;
        std::uint16_t first, count;
        float share;  // of the votes of all siblings
    };

    // Other tokens that could stand in a node's place.
    struct Others {
        int count = 0;
        float prob = 0;  // probability of the likeliest, given that all tokens before it are right
    };

    // ---- looking up ----

    void look_up_context(const MaxPlaces& max_places) {
        const TokenText& own = *sources_.own;
        const Token* end = own.at(own.end());
        context_len_ = static_cast<int>(std::min<std::size_t>(own.size(), kLookBack));
        look_up(end, context_len_, 0, max_places, !own.has_backlog());
    }

    // Adds the occurrences of the tokens before end. The chains are followed in turns, because each step
    // waits for memory.
    void look_up(const Token* end, int length, int depth, const MaxPlaces& max_places,
                 bool is_own_indexed) {
        struct Place {
            Position position;
            const Token* next;  // the tokens after it
        };
        struct Chain {
            const TokenText* text;
            int order;
            int num_left;
            TokenText::Found at;
            int num_places;
            std::array<Place, kMaxChain> places;

            void add(Position position) {
                const Token* next = text->before_end(position) + 1;
                __builtin_prefetch(next);
                places[num_places++] = {position, next};
            }
        };
        std::array<Chain, 2 * kNumOrders> chains;
        int num_chains = 0;
        const int first_order = max_places[0] > 0 ? 0 : 1;
        std::array<std::uint32_t, kNumOrders> hashes{};
        for (int order = first_order; order < kNumOrders; ++order) {
            if (length < kOrders[order]) continue;
            hashes[order] = context_hash(end, order);
            if (sources_.shared) sources_.shared->prefetch_head(hashes[order], order);
            if (!is_own_indexed) sources_.own->prefetch_head(hashes[order], order);
        }
        for (int order = first_order; order < kNumOrders; ++order) {
            if (length < kOrders[order]) continue;
            for (const TokenText* text : {sources_.own, sources_.shared}) {
                if (!text) continue;
                Chain& chain = chains[num_chains++];
                chain.text = text;
                chain.order = order;
                chain.num_places = 0;
                if (order == kUnigram) {
                    std::array<Position, TokenText::kNumRecent> recent;
                    const int num_recent =
                        text->recent(hashes[order], std::span(recent).first(max_places[order]));
                    for (int i = 0; i < num_recent; ++i) chain.add(recent[i]);
                    chain.num_left = 0;
                    continue;
                }
                chain.num_left = max_places[order];
                // The latest place with this context is the context itself.
                chain.at = text == sources_.own && is_own_indexed
                               ? text->previous(text->end() - 1, order)
                               : text->latest(hashes[order], order);
            }
        }
        for (bool is_any_left = true; is_any_left;) {
            is_any_left = false;
            for (int i = 0; i < num_chains; ++i) {
                Chain& chain = chains[i];
                if (chain.num_left == 0 || !chain.at.is_found) continue;
                const Position place = chain.at.place;
                chain.add(place);
                if (--chain.num_left == 0) continue;
                chain.at = chain.text->previous(place, chain.order);
                is_any_left |= chain.at.is_found;
            }
        }
        // Places that the chain of a higher order went through are known already.
        std::array<Position, 2> oldest_seen = {kNowhere, kNowhere};
        int higher_order = kLookBack + 1;
        for (int i = 0; i < num_chains; ++i) {
            const Chain& chain = chains[i];
            if (i > 0 && chain.order != chains[i - 1].order) {
                higher_order = kOrders[chains[i - 1].order];
            }
            if (chain.num_places == 0) continue;
            const TokenText& text = *chain.text;
            const bool is_shared = &text == sources_.shared;
            const int order = kOrders[chain.order];
            for (int j = 0; j < chain.num_places; ++j) {
                const auto [place, next] = chain.places[j];
                const auto num_next = std::min<Position>(text.end() - place - 1, kLookAhead);
                if (num_next == 0 || *next == kEnd) continue;
                const auto num_before = std::min<Position>(place + 1 - text.begin(), kLookBack);
                const int match_len =
                    common_suffix(next, end, std::min(length, static_cast<int>(num_before)));
                if (match_len < order) continue;  // another context in the same bucket
                if (match_len >= higher_order && place >= oldest_seen[is_shared]) continue;
                if (num_occurrences_ == kMaxOccurrences) return;
                const Position age = text.end() - 1 - place;
                const MatchOrigin origin = origin_of(place, is_shared);
                occurrences_[num_occurrences_++] = {next,
                                                    static_cast<std::uint16_t>(num_next),
                                                    static_cast<std::uint8_t>(match_len),
                                                    static_cast<std::uint8_t>(depth),
                                                    origin,
                                                    age,
                                                    weights_.of_place(age, origin)};
            }
            oldest_seen[is_shared] = chain.places[chain.num_places - 1].position;
        }
    }

    // Without a branch, because it would be unpredictable.
    MatchOrigin origin_of(Position place, bool is_shared) const {
        constexpr int kOutput = static_cast<int>(MatchOrigin::kOutput);
        constexpr int kShared = static_cast<int>(MatchOrigin::kShared);
        static_assert(static_cast<int>(MatchOrigin::kPrompt) == 0 && kOutput == 1 && kShared > kOutput);
        return static_cast<MatchOrigin>(std::max(kShared * static_cast<int>(is_shared),
                                                 static_cast<int>(place >= sources_.prompt_end)));
    }

    // ---- growing ----

    void grow_chain() {
        int repeating = -1;
        while (draft_->num_nodes < max_nodes_ && node_.depth < kLookAhead) {
            Group next;
            const bool is_agreed = only_child(next);
            if (!is_agreed) {
                num_members_ = node_.first + node_.count;
                num_groups_ = 0;
                split();
                if (num_groups_ == 0) {
                    // The text ends after every occurrence, so its latest tokens repeat.
                    if (index_ == repeating) return;
                    repeating = index_;
                    num_occurrences_ = num_members_ = 0;
                    node_.first = node_.count = 0;
                    rematch();
                    continue;
                }
                next = *std::max_element(
                    groups_.begin(), groups_.begin() + num_groups_,
                    [](const Group& a, const Group& b) { return a.prob < b.prob; });
            }
            if (next.prob < min_prob_) return;
            if (!is_agreed) note_others(next);
            add_node(next);
            if (node_.count == 1) follow_one();
        }
    }

    // Notes all groups that may follow node_ except the next one.
    void note_others(const Group& next) {
        const auto place = static_cast<std::size_t>(draft_->num_nodes);
        if (place >= others_.size()) return;
        Others& others = others_[place];
        others = {num_groups_ - 1, 0};
        for (int g = 0; g < num_groups_; ++g)
            if (groups_[g].token != next.token) others.prob = std::max(others.prob, groups_[g].prob);
        others.prob /= node_.prob;
    }

    // Adds nodes while the single occurrence continues. It does the same as repeated only_child, for most
    // nodes of a chain.
    void follow_one() {
        Draft& draft = *draft_;
        const Occurrence& o = occurrences_[members_[node_.first]];
        const int ahead = node_.depth - o.depth;
        const int max = std::min({max_nodes_ - draft.num_nodes, kLookAhead - node_.depth,
                                  static_cast<int>(o.num_next) - ahead});
        float prob = node_.prob, score = 0;
        int num = 0;
        for (; num < max; ++num) {
            const Token token = o.next[ahead + num];
            const float next_prob = prob * weights_.share_of(o.match_len + ahead + num, o.place_weight);
            if (token == kEnd || next_prob < min_prob_) break;
            prob = next_prob;
            score += prob;
            const int index = draft.num_nodes + num;
            draft.token_ids[index] = token;
            draft.parents[index] = index - 1;
            draft.depths[index] = node_.depth + num + 1;
            draft.probs[index] = prob;
        }
        if (num == 0) return;
        draft.num_nodes += num;
        draft.match.score += score;
        draft.match.mean_agreement += static_cast<float>(num);
        index_ = draft.num_nodes - 1;
        node_ = {o.next[ahead + num - 1], index_ - 1, node_.depth + num, prob, node_.first, 1, 1.f};
    }

    // Repeatedly adds the most probable node.
    void grow_tree() {
        waiting_.clear();
        while (take_next() && draft_->num_nodes < max_nodes_) {
            if (num_rematches_left_ > 0 && node_.depth < kLookAhead) {
                --num_rematches_left_;
                rematch();
            }
        }
    }

    // Adds the most probable node among node_'s children and the waiting groups, if there is one.
    bool take_next() {
        if (node_.depth < kLookAhead) {
            const int known = num_groups_;
            Group child;
            if (only_child(child)) {
                if (child.prob >= min_prob_ && waiting_.would_be_first(child.prob)) {
                    add_node(child);
                    return true;
                }
                if (num_groups_ < kMaxGroups) groups_[num_groups_++] = child;
            } else {
                split();
            }
            for (int g = known; g < num_groups_; ++g) {
                if (groups_[g].prob >= min_prob_) waiting_.push(g, groups_[g].prob);
            }
        }
        if (waiting_.is_empty()) return false;
        add_node(groups_[waiting_.pop()]);
        return true;
    }

    // Whether all of node_'s occurrences continue with the same token; the child then has all of them.
    // This is the usual case, and it needs no split().
    bool only_child(Group& child) const {
        float sum = 0;
        int longest = 0;
        Token token = kEnd;
        bool is_one = node_.count > 0;
        for (int i = 0; i < node_.count; ++i) {
            const Occurrence& o = occurrences_[members_[node_.first + i]];
            const int ahead = node_.depth - o.depth;
            if (ahead >= o.num_next) return false;
            const Token next = o.next[ahead];
            is_one &= (next != kEnd) & ((i == 0) | (next == token));
            if (!is_one) return false;
            token = next;
            const int match_len = o.match_len + ahead;
            sum += weights_.of_match(match_len) * o.place_weight;
            longest = std::max(longest, match_len);
        }
        const float prob = node_.prob * (sum / (sum + weights_.of_none(longest)));
        child = {token, index_, node_.depth + 1, prob, node_.first, node_.count, 1.f};
        return is_one;
    }

    // Groups node_'s occurrences by their next token, and appends these groups to groups_.
    void split() {
        const int known = num_groups_;
        float sum = 0;
        int longest = 0;
        struct Vote {
            std::uint16_t member;
            std::uint16_t group;
        };
        std::array<Vote, kMaxOccurrences> votes;
        int num_votes = 0;
        std::uint64_t seen = 0;
        if (num_members_ + node_.count > kMaxMembers || known + node_.count >= kMaxGroups) return;
        for (int i = 0; i < node_.count; ++i) {
            const std::uint16_t member = members_[node_.first + i];
            const Occurrence& o = occurrences_[member];
            const int ahead = node_.depth - o.depth;
            if (ahead >= o.num_next) continue;
            const Token token = o.next[ahead];
            if (token == kEnd) continue;
            const int match_len = o.match_len + ahead;
            const float weight = weights_.of_match(match_len) * o.place_weight;
            longest = std::max(longest, match_len);
            sum += weight;
            groups_[num_groups_] = {token, index_, node_.depth + 1, 0, 0, 0, 0};  // kept if it is new
            const int g = find_group(token, known, seen);
            num_groups_ += g == num_groups_;
            groups_[g].share += weight;
            ++groups_[g].count;
            votes[num_votes++] = {member, static_cast<std::uint16_t>(g)};
        }
        // Members of one group stand together.
        int first = num_members_;
        const float none = weights_.of_none(longest);
        for (int g = known; g < num_groups_; ++g) {
            Group& group = groups_[g];
            group.first = static_cast<std::uint16_t>(first);
            first += group.count;
            group.count = 0;
            group.prob = node_.prob * group.share / (sum + none);
            group.share /= sum;
        }
        for (int v = 0; v < num_votes; ++v) {
            Group& group = groups_[votes[v].group];
            members_[group.first + group.count++] = votes[v].member;
        }
        num_members_ = first;
    }

    // The group of this token among those from `known` on, or num_groups_, which has this token too.
    // seen: the hashes of their tokens, as bits. A branch on whether it is new would be unpredictable.
    int find_group(Token token, int known, std::uint64_t& seen) {
        const auto hash = static_cast<std::uint32_t>(token) * 0x9E3779B1u >> 26;
        const auto is_seen = static_cast<int>(seen >> hash & 1);
        int g = num_groups_ + is_seen * (group_by_hash_[hash] - num_groups_);
        if (groups_[g].token != token) {  // another token with the same hash
            g = known;
            while (groups_[g].token != token) ++g;
        }
        group_by_hash_[hash] = static_cast<std::uint16_t>(g);
        seen |= std::uint64_t{1} << hash;
        return g;
    }

    // Looks up the context that ends with node_ of the draft, and adds new occurrences to its members.
    void rematch() {
        std::array<Token, kLookBack> context;
        const int num_drafted = std::min(node_.depth, kLookBack);
        const int num_kept = std::min(context_len_, kLookBack - num_drafted);
        const int length = num_kept + num_drafted;
        const TokenText& own = *sources_.own;
        std::copy_n(own.at(own.end()) - num_kept, num_kept, context.data());
        for (int i = index_, at = length; at > num_kept; i = draft_->parents[i]) {
            context[--at] = draft_->token_ids[i];
        }
        const int known = num_occurrences_;
        look_up(context.data() + length, length, node_.depth, kRematchPlaces, false);
        if (num_members_ + node_.count + num_occurrences_ - known > kMaxMembers) {
            num_occurrences_ = known;
            return;
        }
        const int first = num_members_;
        std::array<const Token*, kMaxOccurrences> nexts;
        int shortest = kLookBack;  // the shortest match of a member
        for (int i = 0; i < node_.count; ++i) {
            const std::uint16_t member = members_[node_.first + i];
            const Occurrence& o = occurrences_[member];
            members_[first + i] = member;
            nexts[i] = o.next + (node_.depth - o.depth);
            shortest = std::min(shortest, o.match_len + (node_.depth - o.depth));
        }
        num_members_ += node_.count;
        for (int i = known; i < num_occurrences_; ++i) {
            bool is_member = false;
            if (occurrences_[i].match_len >= shortest) {
                for (int j = 0; j < node_.count; ++j) is_member |= nexts[j] == occurrences_[i].next;
            }
            members_[num_members_] = static_cast<std::uint16_t>(i);
            num_members_ += !is_member;
        }
        node_.first = static_cast<std::uint16_t>(first);
        node_.count = static_cast<std::uint16_t>(num_members_ - first);
    }

    // Adds a node to the draft and makes it node_.
    void add_node(const Group& group) {
        node_ = group;
        Draft& draft = *draft_;
        index_ = draft.num_nodes++;
        draft.token_ids[index_] = group.token;
        draft.parents[index_] = group.parent;
        draft.depths[index_] = group.depth;
        draft.probs[index_] = group.prob;
        draft.match.score += group.prob;
        draft.match.mean_agreement += group.share;
        if (index_ == 0) describe_first(group, draft.match);
    }

    void describe_first(const Group& group, Match& match) {
        match.num_occurrences = static_cast<float>(num_first_votes_);
        match.num_agreeing = static_cast<float>(group.count);
        match.agreement = group.share;
        const Occurrence* best = nullptr;
        for (int i = 0; i < group.count; ++i) {
            const Occurrence& o = occurrences_[members_[group.first + i]];
            if (!best || o.match_len > best->match_len ||
                (o.match_len == best->match_len && o.place_weight > best->place_weight)) {
                best = &o;
            }
        }
        source_ = *best;
        match.match_len = best->match_len;
        match.origin = static_cast<float>(best->origin);
        match.age = static_cast<float>(best->age);
    }

    static constexpr int kMaxChain = 16;
    static constexpr Position kNowhere = std::numeric_limits<Position>::max();

    const DraftWeights& weights_ = DraftWeights::get();
    Sources sources_{};
    Draft* draft_ = nullptr;
    int max_nodes_ = 0;
    float min_prob_ = 0;
    int context_len_ = 0;

    Group node_{};    // the latest node of the draft
    int index_ = -1;  // its index in the draft; -1: the context
    int num_rematches_left_ = 0;
    int num_first_votes_ = 0;
    std::array<Others, kEvidenceDepth> others_{};
    Occurrence source_{};  // the longest match that the first draft token follows
    int num_occurrences_ = 0;
    int num_members_ = 0;
    int num_groups_ = 0;
    std::array<Occurrence, kMaxOccurrences> occurrences_;
    std::array<std::uint16_t, kMaxMembers> members_;
    std::array<Group, kMaxGroups> groups_;
    std::array<std::uint16_t, 64> group_by_hash_{};
    WaitingGroups<kMaxGroups> waiting_;  // of a tree: groups that may become nodes
};

}  // namespace sglang_hvd
