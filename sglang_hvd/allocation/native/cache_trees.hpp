// Cache drafts as trees: a chain, of which the payoff predictor says how far it is right, and the
// branches that the votes of the suffix cache add to it. docs/allocation.md derives it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace sglang_hvd {

// A text that leaves the chain continues as the other votes say less often than their shares of the votes. The
// factor is the one that serves recorded texts fastest (docs/allocation.md).
constexpr float kBranchShare = 0.45f;

struct ChainDraft {
    std::span<const std::int32_t> tokens;
    const float* survival;  // by token: P(it and all before it are right)
};

// Parents stand before their children; -1 is what follows the context itself.
struct VotesTree {
    std::span<const std::int32_t> tokens, parents, depths;
    std::span<const float> probs;  // of the paths
};

struct TreeRow {
    std::span<std::int32_t> tokens, parents, depths;
    std::span<float> probs;
    std::span<bool> is_chain;
};

// The first nodes of a tree.
struct PartOfTree {
    bool is_tree = false;       // it has nodes that are not of the chain
    std::size_t chain_len = 0;  // leading chain tokens that the verification gives evidence about
    double chain_expected = 0;  // expected accepted tokens of these
};

// survival: of the chain that the tree was made of, which has chain_len tokens.
inline PartOfTree measure(std::span<const bool> is_chain, const float* survival, std::size_t chain_len) {
    PartOfTree part;
    for (const bool of_chain : is_chain)
        if (of_chain) part.chain_expected += survival[part.chain_len++];
    part.is_tree = part.chain_len < is_chain.size();
    // Only a branch is verified: the first committed token still shows whether the chain's first was right.
    if (part.is_tree && part.chain_len == 0 && chain_len > 0) {
        part.chain_len = 1;
        part.chain_expected = survival[0];
    }
    return part;
}

class TreeJoiner {
public:
    // Writes the most probable nodes of both, as many as there is room for, each after its parent.
    std::size_t join(const ChainDraft& chain, const VotesTree& votes, const TreeRow& out) {
        const std::size_t len = chain.tokens.size();
        nodes_.clear();
        float reach = 1;
        for (std::size_t j = 0; j < len; ++j) {
            reach = std::min(reach, chain.survival[j]);
            const auto depth = static_cast<std::int32_t>(j) + 1;
            nodes_.push_back({chain.tokens[j], depth - 2, depth, reach});
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
            const float of_parent = parent < 0 ? 1.0f : nodes_[static_cast<std::size_t>(parent)].prob;
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
            nodes_.push_back({votes.tokens[i], parent, votes.depths[i], prob});
        }
        // Of equally probable nodes the earlier, so none comes before its parent.
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
            out.is_chain[k] = order_[k] < len;
        }
        return num;
    }

private:
    struct Node {
        std::int32_t token, parent, depth;  // parent: place in nodes_, -1 for none
        float prob;
    };
    static constexpr std::int32_t kNone = -2;

    // Where a node of the votes is in nodes_, kNone if it is not there yet.
    std::int32_t place_of(std::int32_t node) const {
        return node < 0 ? -1 : place_[static_cast<std::size_t>(node)];
    }

    std::vector<Node> nodes_;
    std::vector<std::int32_t> place_, rank_;
    std::vector<float> votes_of_chain_;
    std::vector<std::size_t> order_;
};

}  // namespace sglang_hvd
