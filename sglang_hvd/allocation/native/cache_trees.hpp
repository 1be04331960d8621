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

// The first nodes of a tree. What is expected: accepted tokens.
struct PartOfTree {
    bool is_tree = false;        // it has nodes beside the chain
    std::size_t chain_len = 0;   // first tokens of the chain of which it tells
    double chain_expected = 0;   // of these
    double branch_expected = 0;  // of the nodes beside the chain
};

// survival: of the chain that the tree was made of, which has chain_len tokens.
inline PartOfTree measure(std::span<const float> probs, std::span<const bool> is_chain,
                          const float* survival, std::size_t chain_len) {
    PartOfTree part;
    for (std::size_t node = 0; node < probs.size(); ++node) {
        if (is_chain[node])
            part.chain_expected += survival[part.chain_len++];
        else
            part.branch_expected += probs[node];
    }
    part.is_tree = part.chain_len < probs.size();
    // A branch alone: the first token that is committed tells of the chain's first, if any.
    if (part.is_tree && part.chain_len == 0 && chain_len > 0) {
        part.chain_len = 1;
        part.chain_expected = survival[0];
    }
    return part;
}

// Nodes of a draft that go on as the text does, from its first token on.
inline std::size_t count_right(std::span<const std::int32_t> tokens, std::span<const std::int32_t> parents,
                               std::span<const std::int32_t> text) {
    std::int32_t before = -1;
    std::size_t count = 0;
    for (const std::int32_t token : text) {
        auto node = static_cast<std::size_t>(before + 1);  // parents stand before their children
        while (node < tokens.size() && !(parents[node] == before && tokens[node] == token)) ++node;
        if (node == tokens.size()) break;
        before = static_cast<std::int32_t>(node);
        ++count;
    }
    return count;
}

// What came of a cycle that verified a draft, tokens. of_model: right of the model drafter's draft,
// below 0 where that is not known; 0 where it was not verified. of_chain: likewise of the chain.
struct CycleCounts {
    std::int32_t num_accepted, of_model, of_chain;
};

// Tokens of a draft that were right beyond its chain. text: committed.
inline std::int32_t count_branch_tokens(std::span<const std::int32_t> tokens,
                                        std::span<const std::int32_t> parents,
                                        std::span<const std::int32_t> text, const CycleCounts& counts) {
    std::int32_t right = counts.num_accepted;
    // Where the model drafter's draft was right less far, all of them were the cache draft's.
    if (counts.of_model < 0 || counts.of_model == right)
        right = static_cast<std::int32_t>(count_right(tokens, parents, text));
    // A chain whose first token was right but not verified had nothing accepted.
    return std::max(right - std::max(counts.of_chain, 0), 0);
}

class TreeJoiner {
public:
    // Writes the most probable nodes of both, as many as there is room for, each after its parent.
    // branch_share: how right the votes are beside the chain.
    std::size_t join(const ChainDraft& chain, const VotesTree& votes, float branch_share,
                     const TreeRow& out) {
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
                    prob = branch_share * (of_parent - goes_on) * std::min(votes.probs[i] / others, 1.0f);
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
