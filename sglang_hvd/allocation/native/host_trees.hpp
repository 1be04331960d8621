// The drafts that the host knows as one tree per request: the cache's chain with the branches that the votes of
// the suffix cache add to it, and the drafts of further sources. docs/experiments/allocation.md derives the probabilities.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "draft_layout.hpp"

namespace sglang_hvd {

// Where a text leaves the chain, the other votes are right less often than their shares say. This factor serves
// recorded texts fastest (docs/experiments/allocation.md).
constexpr float kBranchShare = 0.45f;

struct ChainDraft {
    std::span<const std::int32_t> tokens;
    const float* acceptance;  // by token: P(it and all before it are accepted)
};

// Parents stand before their children; -1 is the parent of nodes that follow the context itself.
struct TreeDraft {
    std::span<const std::int32_t> tokens, parents, depths;
    std::span<const float> probs;  // of the paths
};

// A request's tree: the most probable nodes first, each after its parent. Spans have the room of the row.
struct TreeRow {
    std::span<std::int32_t> tokens, parents, depths;
    std::span<float> probs;
    std::span<bool> is_chain;
    std::span<std::uint8_t> sources;  // the set of sources that propose the node, a bit for each
};

// The arrays of HostTrees (host_trees.py). Row i belongs to request i.
struct TreeRows {
    std::size_t width = 0;
    std::int32_t *token_ids = nullptr, *parents = nullptr, *depths = nullptr;
    float* probs = nullptr;
    bool* is_chain = nullptr;
    std::uint8_t* sources = nullptr;
    std::int32_t* num_nodes = nullptr;

    TreeRow row(std::size_t i) const {
        const std::size_t first = i * width;
        return {{token_ids + first, width}, {parents + first, width},  {depths + first, width},
                {probs + first, width},     {is_chain + first, width}, {sources + first, width}};
    }
};

inline TreeDraft tree_of(const DraftRows& drafts, std::size_t i) {
    return {drafts.tokens(i), drafts.nodes(drafts.parents, i), drafts.nodes(drafts.depths, i),
            drafts.nodes(drafts.probs, i)};
}

// The first nodes of a tree.
struct PartOfTree {
    bool is_tree = false;        // it has nodes that are not of the chain
    std::uint8_t sources = 0;    // the set of sources that propose any of them
    std::size_t chain_len = 0;   // leading chain tokens that the verification gives evidence about
    double chain_predicted = 0;  // predicted accepted tokens of these
};

// acceptance: of the chain that the tree was made of, which has chain_len tokens.
inline PartOfTree measure(std::span<const bool> is_chain, std::span<const std::uint8_t> sources,
                          const float* acceptance, std::size_t chain_len) {
    PartOfTree part;
    for (const bool of_chain : is_chain)
        if (of_chain) part.chain_predicted += acceptance[part.chain_len++];
    for (const std::uint8_t of_node : sources) part.sources |= of_node;
    part.is_tree = part.chain_len < is_chain.size();
    // Only a branch is verified: the first committed token still shows whether the chain's first was right.
    if (part.is_tree && part.chain_len == 0 && chain_len > 0) {
        part.chain_len = 1;
        part.chain_predicted = acceptance[0];
    }
    return part;
}

class TreeJoiner {
public:
    // Writes the most probable nodes of the chain and the votes, as many as there is room for. Returns their
    // number. source: the bit of the cache.
    std::size_t join(const ChainDraft& chain, const TreeDraft& votes, std::uint8_t source, const TreeRow& out) {
        const std::size_t len = chain.tokens.size();
        nodes_.clear();
        float accepted = 1;
        for (std::size_t j = 0; j < len; ++j) {
            accepted = std::min(accepted, chain.acceptance[j]);
            const auto depth = static_cast<std::int32_t>(j) + 1;
            nodes_.push_back({chain.tokens[j], depth - 2, depth, accepted, true, source});
        }
        place_.resize(votes.tokens.size());
        votes_of_chain_.assign(len + 1, 0);
        for (std::size_t i = 0; i < place_.size(); ++i) {
            const std::int32_t parent = place_of(votes.parents[i]), depth = votes.depths[i];
            const bool on_chain = parent == depth - 2 && static_cast<std::size_t>(depth) <= len &&
                                  votes.tokens[i] == chain.tokens[static_cast<std::size_t>(depth) - 1];
            place_[i] = on_chain ? depth - 1 : kNone;
            if (on_chain) votes_of_chain_[static_cast<std::size_t>(depth) - 1] = votes.probs[i];
        }
        for (std::size_t i = 0; i < place_.size(); ++i) {
            if (place_[i] != kNone) continue;
            const std::int32_t above = votes.parents[i], parent = place_of(above);
            const float before = above < 0 ? 1.0f : votes.probs[static_cast<std::size_t>(above)];
            const float of_parent = prob_of(parent);
            float prob = 0;
            if (parent < static_cast<std::int32_t>(len)) {  // it leaves the chain
                const auto depth = static_cast<std::size_t>(votes.depths[i]);
                const float goes_on = depth <= len ? nodes_[depth - 1].prob : 0.0f;
                const float others = before - (depth <= len ? votes_of_chain_[depth - 1] : 0.0f);
                if (others > 0)
                    prob = kBranchShare * (of_parent - goes_on) * std::min(votes.probs[i] / others, 1.0f);
            } else if (before > 0) {
                prob = of_parent * std::min(votes.probs[i] / before, 1.0f);
            }
            place_[i] = static_cast<std::int32_t>(nodes_.size());
            nodes_.push_back({votes.tokens[i], parent, votes.depths[i], prob, false, source});
        }
        return write(out);
    }

    // Adds the draft of another source to the first num nodes of a tree. Equal prefixes are shared: such a node
    // gets the larger of both probabilities, but grows by at most the rest. The rest is the probability that the
    // parent is accepted and none of its children in the tree is. Returns the number of nodes.
    std::size_t add(const TreeRow& tree, std::size_t num, const TreeDraft& draft, std::uint8_t source) {
        nodes_.clear();
        for (std::size_t k = 0; k < num; ++k)
            nodes_.push_back({tree.tokens[k], tree.parents[k], tree.depths[k], tree.probs[k], tree.is_chain[k],
                              tree.sources[k]});
        place_.resize(draft.tokens.size());
        for (std::size_t i = 0; i < place_.size(); ++i) {
            const std::int32_t parent = place_of(draft.parents[i]);
            const float of_parent = prob_of(parent);
            float rest = of_parent;
            place_[i] = kNone;
            for (std::size_t k = 0; k < nodes_.size(); ++k) {
                if (nodes_[k].parent != parent) continue;
                rest -= nodes_[k].prob;
                if (nodes_[k].token == draft.tokens[i]) place_[i] = static_cast<std::int32_t>(k);
            }
            if (place_[i] == kNone) {
                place_[i] = static_cast<std::int32_t>(nodes_.size());
                const float prob = std::clamp(draft.probs[i], 0.0f, std::max(rest, 0.0f));
                nodes_.push_back({draft.tokens[i], parent, draft.depths[i], prob, false, source});
                continue;
            }
            Node& shared = nodes_[static_cast<std::size_t>(place_[i])];
            // A sum that rounds up must not exceed the parent: the node would stand before it.
            const float grown = std::min(shared.prob + std::max(rest, 0.0f), of_parent);
            shared.prob = std::max(shared.prob, std::min(draft.probs[i], grown));
            shared.sources |= source;
        }
        return write(tree);
    }

private:
    struct Node {
        std::int32_t token, parent, depth;  // parent: place in nodes_, -1 for none
        float prob;
        bool is_chain;
        std::uint8_t sources;
    };
    static constexpr std::int32_t kNone = -2;

    // Place in nodes_ of a node of the draft, kNone if it is not there yet.
    std::int32_t place_of(std::int32_t node) const {
        return node < 0 ? -1 : place_[static_cast<std::size_t>(node)];
    }

    float prob_of(std::int32_t place) const {
        return place < 0 ? 1.0f : nodes_[static_cast<std::size_t>(place)].prob;
    }

    // Writes the most probable of nodes_, as many as there is room for.
    std::size_t write(const TreeRow& out) {
        // The earlier of equally probable nodes comes first, so no node comes before its parent.
        order_.resize(nodes_.size());
        std::iota(order_.begin(), order_.end(), std::size_t{0});
        std::stable_sort(order_.begin(), order_.end(),
                         [&](std::size_t a, std::size_t b) { return nodes_[a].prob > nodes_[b].prob; });
        const std::size_t num = std::min(order_.size(), out.tokens.size());
        rank_.resize(nodes_.size());
        for (std::size_t k = 0; k < num; ++k) {
            const Node& node = nodes_[order_[k]];
            rank_[order_[k]] = static_cast<std::int32_t>(k);
            out.tokens[k] = node.token;
            out.parents[k] = node.parent < 0 ? -1 : rank_[static_cast<std::size_t>(node.parent)];
            out.depths[k] = node.depth;
            out.probs[k] = node.prob;
            out.is_chain[k] = node.is_chain;
            out.sources[k] = node.sources;
        }
        return num;
    }

    std::vector<Node> nodes_;
    std::vector<std::int32_t> place_, rank_;
    std::vector<float> votes_of_chain_;
    std::vector<std::size_t> order_;
};

}  // namespace sglang_hvd
