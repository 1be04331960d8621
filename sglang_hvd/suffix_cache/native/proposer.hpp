// Drafts by vote: every earlier occurrence of the latest tokens votes for what followed it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "draft_weights.hpp"
#include "token_text.hpp"

namespace sglang_hvd {

constexpr int kMaxNodes = 256;

// What is known about a draft before it is verified.
struct MatchFeatures {
    float match_len = 0;        // longest match among the occurrences of the first draft token
    float score = 0;            // sum of the nodes' probabilities: expected accepted tokens
    float num_tokens = 0;       // nodes of the draft
    float origin = 0;           // of that longest match: 0 prompt, 1 own output, 2 shared cache
    float age = 0;              // tokens between that match and the end of its text
    float num_occurrences = 0;  // occurrences found
    float num_agreeing = 0;     // of them, followed by the first draft token
    float agreement = 0;        // their share of the votes
    float mean_agreement = 0;   // the same share, mean over the draft's nodes
};
constexpr int kNumFeatures = sizeof(MatchFeatures) / sizeof(float);

// A draft in the order of growth: parents stand before their children.
struct Draft {
    std::span<Token> token_ids;
    std::span<std::int32_t> parents;  // index of the node before; -1: follows the context
    std::span<std::int32_t> depths;   // 1 for the tokens that may come next
    std::span<float> probs;           // estimated probability that the node is accepted
    int num_nodes = 0;
    MatchFeatures features;
};

enum class DraftShape : std::uint8_t { kChain, kTree };

// Workspace for one draft at a time; reused, it allocates nothing.
class Proposer {
public:
    // The texts to look in: the request's own (which ends with the context) and the shared one.
    struct Sources {
        const TokenText* own;
        Position prompt_end;
        const TokenText* shared;
    };

    // Fills draft with at most max_nodes nodes, at most kLookAhead deep.
    void propose(const Sources& sources, DraftShape shape, int max_nodes, float min_prob,
                 Draft& draft) {
        draft.num_nodes = 0;
        draft.features = {};
        max_nodes = std::min(max_nodes, kMaxNodes);
        if (max_nodes <= 0 || sources.own->size() == 0) return;
        sources_ = sources;
        num_occurrences_ = 0;
        num_members_ = 0;
        heap_.clear();
        look_up_context(shape == DraftShape::kChain ? kChainPlaces : kTreePlaces);
        if (num_occurrences_ == 0) return;
        Group root{kEnd, -1, 0, 1.f, 0, static_cast<std::uint16_t>(num_occurrences_)};
        for (int i = 0; i < num_occurrences_; ++i) members_[num_members_++] = static_cast<std::uint16_t>(i);
        num_first_votes_ = num_occurrences_;
        num_rematches_left_ = shape == DraftShape::kChain
                                  ? kLookAhead
                                  : std::min(max_nodes / kNodesPerRematch, kMaxRematches);
        if (shape == DraftShape::kChain) {
            grow_chain(root, max_nodes, min_prob, draft);
        } else {
            grow_tree(root, max_nodes, min_prob, draft);
        }
        draft.features.num_tokens = static_cast<float>(draft.num_nodes);
        if (draft.num_nodes > 0) draft.features.mean_agreement /= draft.features.num_tokens;
    }

private:
    static constexpr int kMaxOccurrences = 192;
    static constexpr int kMaxMembers = 1 << 13;
    // Latest places looked at for each order, in each text: when the context is looked up for a
    // chain or for a tree, and when a drafted context is. A tree has room for the less likely.
    using MostPlaces = std::array<int, kNumOrders>;
    static constexpr MostPlaces kChainPlaces = {4, 8, 12};
    static constexpr MostPlaces kTreePlaces = {4, 12, TokenText::kNumRecent};
    static constexpr MostPlaces kRematchPlaces = {0, 4, 4};
    static constexpr int kNodesPerRematch = 8;
    static constexpr int kMaxRematches = 8;

    struct Occurrence {
        const Token* next;       // what followed it
        std::uint16_t num_next;  // how many tokens of that
        std::uint8_t match_len;
        std::uint8_t depth;  // of the node whose context it matches
        Origin origin;
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
        float share = 0;  // of its siblings' votes
        bool operator<(const Group& other) const { return prob < other.prob; }
    };

    // ---- looking up ----

    void look_up_context(const MostPlaces& most) {
        const TokenText& own = *sources_.own;
        const Token* end = own.at(own.end());
        context_len_ = static_cast<int>(std::min<std::size_t>(own.size(), kLookBack));
        look_up(end, context_len_, 0, most, !own.has_backlog());
    }

    // Adds the occurrences of the tokens before end. Different chains are followed in turn, since
    // each step waits for memory.
    void look_up(const Token* end, int length, int depth,
                 const MostPlaces& most, bool is_own_indexed) {
        struct Chain {
            const TokenText* text;
            int order;
            int num_left;
            TokenText::Found at;
            int num_places;
        };
        std::array<Chain, 2 * kNumOrders> chains;
        std::array<std::array<Position, kMaxChain>, 2 * kNumOrders> places;
        int num_chains = 0;
        const int first_order = most[0] > 0 ? 0 : 1;
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
                chain = {text, order, most[order], {}, 0};
                if (order != kUnigram) {
                    // The latest place with this context is the context itself.
                    chain.at = text == sources_.own && is_own_indexed
                                   ? text->previous(text->end() - 1, order)
                                   : text->latest(hashes[order], order);
                    continue;
                }
                std::span<Position> to = places[num_chains - 1];
                chain.num_places = text->recent(hashes[order], to.first(most[order]));
                chain.num_left = 0;
                for (const Position place : to.first(chain.num_places))
                    __builtin_prefetch(text->at(place));
            }
        }
        for (bool is_any_left = true; is_any_left;) {
            is_any_left = false;
            for (int i = 0; i < num_chains; ++i) {
                Chain& chain = chains[i];
                if (!chain.at.is_found || chain.num_left == 0) continue;
                const Position place = chain.at.place;
                places[i][chain.num_places++] = place;
                __builtin_prefetch(chain.text->at(place));
                --chain.num_left;
                chain.at = chain.text->previous(place, chain.order);
                is_any_left = true;
            }
        }
        // A place that the chain of a higher order went through is known already.
        std::array<Position, 2> oldest_seen = {kNowhere, kNowhere};
        int higher_order = kLookBack + 1;
        for (int i = 0; i < num_chains; ++i) {
            const Chain& chain = chains[i];
            const bool is_shared = chain.text == sources_.shared;
            if (i > 0 && chain.order != chains[i - 1].order) higher_order = kOrders[chains[i - 1].order];
            for (int j = 0; j < chain.num_places; ++j) {
                consider(*chain.text, is_shared, places[i][j], end, length, kOrders[chain.order],
                         depth, higher_order, oldest_seen[is_shared]);
            }
            if (chain.num_places > 0) {
                oldest_seen[is_shared] = places[i][chain.num_places - 1];
            }
        }
    }

    void consider(const TokenText& text, bool is_shared, Position place, const Token* end,
                  int length, int order, int depth, int higher_order, Position oldest_seen) {
        const Token* next = text.at(place) + 1;
        const auto num_next = std::min<Position>(text.end() - place - 1, kLookAhead);
        if (num_next == 0 || *next == kEnd || num_occurrences_ == kMaxOccurrences) return;
        const int most = std::min<int>(length, static_cast<int>(std::min<Position>(
                                                   place + 1 - text.begin(), kLookBack)));
        const int match_len = common_suffix(next, end, most);
        if (match_len < order) return;  // another context in the same bucket
        if (match_len >= higher_order && place >= oldest_seen) return;
        const Position age = text.end() - 1 - place;
        const Origin origin = is_shared                       ? Origin::kShared
                              : place < sources_.prompt_end ? Origin::kPrompt
                                                              : Origin::kOutput;
        occurrences_[num_occurrences_++] = {
            next,  static_cast<std::uint16_t>(num_next), static_cast<std::uint8_t>(match_len),
            static_cast<std::uint8_t>(depth), origin, age, weights_.of_place(age, origin)};
    }

    // ---- growing ----

    // Splits a node's occurrences by their next token, into groups_.
    void split(const Group& node, int node_index) {
        num_groups_ = 0;
        const int depth = node.depth;
        float sum = 0;
        int longest = 0;
        struct Vote {
            std::uint16_t member;
            std::uint16_t group;
        };
        std::array<Vote, kMaxOccurrences> votes;
        int num_votes = 0;
        for (int i = 0; i < node.count; ++i) {
            const std::uint16_t member = members_[node.first + i];
            const Occurrence& o = occurrences_[member];
            const int ahead = depth - o.depth;
            if (ahead >= o.num_next) continue;
            const Token token = o.next[ahead];
            if (token == kEnd) continue;
            const int match_len = o.match_len + ahead;
            const float weight = weights_.of_match(match_len) * o.place_weight;
            longest = std::max(longest, match_len);
            sum += weight;
            int g = 0;
            while (g < num_groups_ && groups_[g].token != token) ++g;
            if (g == num_groups_) {
                groups_[num_groups_++] = {token, node_index, depth + 1, 0, 0, 0};
            }
            groups_[g].share += weight;
            ++groups_[g].count;
            votes[num_votes++] = {member, static_cast<std::uint16_t>(g)};
        }
        if (num_groups_ == 0) return;
        // Members of one group stand together.
        if (num_members_ + num_votes > kMaxMembers) {
            num_groups_ = 0;
            return;
        }
        int first = num_members_;
        const float none = weights_.of_none(longest);
        for (int g = 0; g < num_groups_; ++g) {
            Group& group = groups_[g];
            group.first = static_cast<std::uint16_t>(first);
            first += group.count;
            group.count = 0;
            group.prob = node.prob * group.share / (sum + none);
            group.share /= sum;
        }
        for (int v = 0; v < num_votes; ++v) {
            Group& group = groups_[votes[v].group];
            members_[group.first + group.count++] = votes[v].member;
        }
        num_members_ = first;
    }

    // Looks up the context that ends with this draft node, and adds what is new to its members.
    void rematch(Group& node, const Draft& draft, int node_index) {
        --num_rematches_left_;
        std::array<Token, kLookBack + kLookAhead> context;
        const int num_drafted = std::min(node.depth, kLookBack);
        const int num_kept = std::min(context_len_, kLookBack - num_drafted);
        const TokenText& own = *sources_.own;
        std::copy_n(own.at(own.end()) - num_kept, num_kept, context.data());
        for (int i = node_index, at = num_kept + num_drafted; at > num_kept; i = draft.parents[i]) {
            context[--at] = draft.token_ids[i];
        }
        const int known = num_occurrences_;
        const int length = num_kept + num_drafted;
        look_up(context.data() + length, length, node.depth, kRematchPlaces, false);
        if (num_members_ + node.count + num_occurrences_ - known > kMaxMembers) {
            num_occurrences_ = known;
            return;
        }
        const int first = num_members_;
        for (int i = 0; i < node.count; ++i) {
            members_[num_members_++] = members_[node.first + i];
        }
        for (int i = known; i < num_occurrences_; ++i) {
            bool is_new = true;
            for (int j = 0; j < node.count && is_new; ++j) {
                const Occurrence& o = occurrences_[members_[first + j]];
                is_new = o.next + (node.depth - o.depth) != occurrences_[i].next;
            }
            if (is_new) members_[num_members_++] = static_cast<std::uint16_t>(i);
        }
        node.first = static_cast<std::uint16_t>(first);
        node.count = static_cast<std::uint16_t>(num_members_ - first);
    }

    int add_node(const Group& group, Draft& draft) {
        const int index = draft.num_nodes++;
        draft.token_ids[index] = group.token;
        draft.parents[index] = group.parent;
        draft.depths[index] = group.depth;
        draft.probs[index] = group.prob;
        draft.features.score += group.prob;
        draft.features.mean_agreement += group.share;
        if (index == 0) describe_first(group, draft.features);
        return index;
    }

    void grow_chain(Group node, int max_nodes, float min_prob, Draft& draft) {
        int index = -1;
        while (draft.num_nodes < max_nodes && node.depth < kLookAhead) {
            num_members_ = node.first + node.count;
            split(node, index);
            if (num_groups_ == 0) {
                // No occurrence goes on: the text ends there. Its latest tokens repeat.
                if (index < 0 || num_rematches_left_ == 0) break;
                num_occurrences_ = num_members_ = 0;
                node.first = node.count = 0;
                rematch(node, draft, index);
                split(node, index);
                if (num_groups_ == 0) break;
            }
            const Group& best = *std::max_element(groups_.begin(), groups_.begin() + num_groups_);
            if (best.prob < min_prob) break;
            node = best;
            index = add_node(node, draft);
            if (node.count == 1) index = follow_one(node, index, max_nodes, min_prob, draft);
        }
    }

    // The same as splitting again and again, for the usual case that one occurrence is left.
    int follow_one(Group& node, int index, int max_nodes, float min_prob, Draft& draft) {
        const Occurrence& o = occurrences_[members_[node.first]];
        const int most = std::min(max_nodes, draft.num_nodes + kLookAhead - node.depth);
        node.share = 1;
        while (draft.num_nodes < most) {
            const int ahead = node.depth - o.depth;
            if (ahead >= o.num_next || o.next[ahead] == kEnd) break;
            const float weight = weights_.of_match(o.match_len + ahead) * o.place_weight;
            const float prob = node.prob * weight / (weight + weights_.of_none(o.match_len + ahead));
            if (prob < min_prob) break;
            node.token = o.next[ahead];
            node.parent = index;
            node.prob = prob;
            ++node.depth;
            index = add_node(node, draft);
        }
        return index;
    }

    void grow_tree(const Group& root, int max_nodes, float min_prob, Draft& draft) {
        split(root, -1);
        push_groups(min_prob);
        while (!heap_.empty()) {
            std::pop_heap(heap_.begin(), heap_.end());
            Group node = heap_.back();
            heap_.pop_back();
            const int index = add_node(node, draft);
            if (draft.num_nodes == max_nodes) break;
            if (node.depth == kLookAhead) continue;
            if (num_rematches_left_ > 0) rematch(node, draft, index);
            split(node, index);
            push_groups(min_prob);
        }
    }

    void push_groups(float min_prob) {
        for (int g = 0; g < num_groups_; ++g) {
            if (groups_[g].prob < min_prob) continue;
            heap_.push_back(groups_[g]);
            std::push_heap(heap_.begin(), heap_.end());
        }
    }

    void describe_first(const Group& group, MatchFeatures& features) {
        features.num_occurrences = static_cast<float>(num_first_votes_);
        features.num_agreeing = static_cast<float>(group.count);
        features.agreement = group.share;
        const Occurrence* best = nullptr;
        for (int i = 0; i < group.count; ++i) {
            const Occurrence& o = occurrences_[members_[group.first + i]];
            if (!best || o.match_len > best->match_len ||
                (o.match_len == best->match_len && o.place_weight > best->place_weight)) {
                best = &o;
            }
        }
        features.match_len = best->match_len;
        features.origin = static_cast<float>(best->origin);
        features.age = static_cast<float>(best->age);
    }

    static constexpr int kMaxChain = 16;
    static constexpr Position kNowhere = std::numeric_limits<Position>::max();

    const DraftWeights& weights_ = DraftWeights::get();
    Sources sources_{};
    int context_len_ = 0;
    std::array<Occurrence, kMaxOccurrences> occurrences_;
    int num_occurrences_ = 0;
    std::array<std::uint16_t, kMaxMembers> members_;
    int num_members_ = 0;
    std::array<Group, kMaxOccurrences> groups_;
    int num_groups_ = 0;
    std::vector<Group> heap_;
    int num_rematches_left_ = 0;
    int num_first_votes_ = 0;
};

}  // namespace sglang_hvd
