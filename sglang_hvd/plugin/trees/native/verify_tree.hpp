// The verify tree: the drafts of a request as one trie, in the form that SGLang reads. layout_kernels.py does the
// same on a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

namespace sglang_hvd {

// A request's nodes, each after its parent; the root is the first. See DraftNodes.
struct NodeRow {
    std::span<std::int64_t> token_ids, parents;
    std::size_t num_used;
};

// A request's tree as EAGLE's draft loop leaves it. See EagleTrees.
struct EagleTree {
    std::span<const std::int64_t> token_ids, parent_list, top_scores_index;
    std::int64_t topk;
    std::optional<std::span<const std::int64_t>> ranks;
    std::int64_t num_kept;
};

// A draft of a HostDrafts (types.py), and the last committed token.
struct HostDraft {
    std::span<const std::int32_t> token_ids, parents;
    std::int64_t root;
};

// Writes a draft as a request's nodes. Slots that it does not use become 0.
inline void write_nodes(const HostDraft& draft, std::span<std::int64_t> token_ids, std::span<std::int64_t> parents) {
    std::fill(token_ids.begin(), token_ids.end(), 0);
    std::fill(parents.begin(), parents.end(), 0);
    token_ids[0] = draft.root;
    for (std::size_t node = 0; node < draft.token_ids.size(); ++node) {
        token_ids[node + 1] = draft.token_ids[node];
        parents[node + 1] = draft.parents[node] + 1;
    }
}

class TreeMerger {
public:
    // Adds the tree's kept nodes to the row and marks all slots that the tree has. Equal prefixes are shared: a
    // node that the row already has is not added again. Returns the number of used slots.
    //
    // Throws std::invalid_argument if the row has no room.
    std::size_t merge(const NodeRow& row, const EagleTree& tree, std::span<std::uint8_t> is_model_node) {
        const std::size_t num_before = row.num_used;
        std::size_t num = num_before;
        places_.clear();
        for (std::size_t k = 0; k < tree.token_ids.size(); ++k) {
            const std::optional<std::size_t> parent = parent_of(tree, k);
            const bool is_kept = parent && (!tree.ranks || (*tree.ranks)[k] < tree.num_kept);
            std::optional<std::size_t> at;
            if (parent) at = find(row, num_before, *parent, tree.token_ids[k]);
            if (!at && is_kept) {
                if (num == row.token_ids.size()) throw std::invalid_argument("a row has no room for all drafts");
                at = num++;
                row.token_ids[*at] = tree.token_ids[k];
                row.parents[*at] = static_cast<std::int64_t>(*parent);
            }
            if (at && is_kept) is_model_node[*at] = 1;
            places_.push_back(at);
        }
        return num;
    }

private:
    // The place of a node's parent in the row. None if the parent was not selected, which can happen with equal
    // scores, or has no place itself.
    std::optional<std::size_t> parent_of(const EagleTree& tree, std::size_t k) const {
        const auto group = static_cast<std::size_t>(tree.top_scores_index[k] / tree.topk);
        if (group == 0) return 0;
        const std::int64_t candidate = tree.parent_list[group];
        for (std::size_t earlier = 0; earlier < k; ++earlier)
            if (tree.top_scores_index[earlier] == candidate) return places_[earlier];
        return std::nullopt;
    }

    static std::optional<std::size_t> find(const NodeRow& row, std::size_t num_before, std::size_t parent,
                                           std::int64_t token) {
        for (std::size_t slot = parent + 1; slot < num_before; ++slot)
            if (row.parents[slot] == static_cast<std::int64_t>(parent) && row.token_ids[slot] == token)
                return slot;
        return std::nullopt;
    }

    std::vector<std::optional<std::size_t>> places_;  // in the row, of the tree's nodes
};

// A request's tree as SGLang verifies it. See VerifyLayout.
struct LayoutRow {
    std::span<std::int64_t> positions, next_token, next_sibling;
    std::uint8_t* mask;    // the start of the tree's own cells in the root's row
    std::size_t mask_row;  // cells from one node's row to the next one's
};

class TreeLayouter {
public:
    // An unused slot has no links and depth 1, and sees the root and itself, since no row of a mask may be empty.
    // Nothing links to it, so it is never accepted.
    void lay_out(std::span<const std::int64_t> parents, std::size_t num_used, std::int64_t seq_len,
                 const LayoutRow& out) {
        const std::size_t w = parents.size();
        latest_child_.assign(w, 0);
        for (std::size_t slot = 0; slot < w; ++slot) {
            out.next_token[slot] = out.next_sibling[slot] = -1;
            std::uint8_t* const visible = out.mask + slot * out.mask_row;
            const bool is_child = slot > 0 && slot < num_used;
            const std::size_t parent = is_child ? static_cast<std::size_t>(parents[slot]) : 0;
            if (slot == 0)
                std::memset(visible, 0, w);
            else
                std::memcpy(visible, out.mask + parent * out.mask_row, w);
            visible[slot] = 1;
            out.positions[slot] = slot == 0 ? seq_len : out.positions[parent] + 1;
            if (!is_child) continue;
            std::size_t& latest = latest_child_[parent];
            (latest == 0 ? out.next_token[parent] : out.next_sibling[latest]) = static_cast<std::int64_t>(slot);
            latest = slot;
        }
    }

private:
    std::vector<std::size_t> latest_child_;  // of each slot; 0: none
};

}  // namespace sglang_hvd
