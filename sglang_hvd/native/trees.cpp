// The Python bindings of the verify tree. Conversions and checks of shapes only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>

#include "bindings.hpp"
#include "bound_arrays.hpp"
#include "verify_tree.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sglang_hvd {
namespace {

// Rows that may have other values between them.
using Rows = nb::ndarray<std::int64_t, nb::ndim<2>, nb::device::cpu>;
using Column = nb::ndarray<std::int64_t, nb::ndim<1>, nb::device::cpu>;

std::span<std::int64_t> row_of(const Rows& array, std::size_t row) {
    return {array.data() + static_cast<std::int64_t>(row) * array.stride(0), array.shape(1)};
}

std::int64_t& at(const Column& column, std::size_t row) {
    return column.data()[static_cast<std::int64_t>(row) * column.stride(0)];
}

void require_nodes(const Rows& parents, const Column& num_used) {
    const std::size_t w = parents.shape(1);
    require(w == 1 || parents.stride(1) == 1, "the nodes of a row must be side by side");
    require(num_used.shape(0) == parents.shape(0), "nodes need one row per request");
    for (std::size_t i = 0; i < num_used.shape(0); ++i) {
        const std::int64_t num = at(num_used, i);
        require(num >= 1 && num <= static_cast<std::int64_t>(w), "a row has its root, and room");
        const auto row = row_of(parents, i);
        for (std::size_t slot = 1; slot < static_cast<std::size_t>(num); ++slot)
            require(row[slot] >= 0 && row[slot] < static_cast<std::int64_t>(slot), "a node stands after its parent");
    }
}

// Trees of EAGLE's draft loop; see EagleTrees.
struct EagleArrays {
    Input<std::int64_t, 2> tokens, parent_list, top_scores_index;
    std::int64_t topk;
    std::optional<Input<std::int64_t, 2>> ranks;
    Input<std::int64_t, 1> num_kept;

    EagleTree row(std::size_t i) const {
        EagleTree tree{tokens.row(i), parent_list.row(i), top_scores_index.row(i), topk, std::nullopt,
                       num_kept.data()[i]};
        if (ranks) tree.ranks = ranks->row(i);
        return tree;
    }
};

// Checks trees for n requests. rows: the requests of the trees; none: all.
void require_trees(const EagleArrays& trees, const std::optional<Input<std::int64_t, 1>>& rows, std::size_t n) {
    const std::size_t k = trees.tokens.shape(0), m = trees.tokens.shape(1);
    require(rows ? rows->size() == k : k == n, "each tree has its row");
    require(trees.parent_list.shape(0) == k && trees.top_scores_index.shape(0) == k &&
                trees.top_scores_index.shape(1) == m && trees.num_kept.size() == k &&
                (!trees.ranks || (trees.ranks->shape(0) == k && trees.ranks->shape(1) == m)),
            "trees need one row per request that drafts");
    require(trees.topk >= 1, "topk is 1 or more");
    const auto num_groups = static_cast<std::int64_t>(std::max(trees.parent_list.shape(1), std::size_t{1}));
    for (std::size_t i = 0; i < trees.top_scores_index.size(); ++i)
        require(trees.top_scores_index.data()[i] >= 0 && trees.top_scores_index.data()[i] / trees.topk < num_groups,
                "a candidate must have a group");
    for (std::size_t i = 0; rows && i < k; ++i)
        require(rows->data()[i] >= 0 && rows->data()[i] < static_cast<std::int64_t>(n), "a row must be that of a request");
}

void merge(const Rows& token_ids, const Rows& parents, const Column& num_used,
           const Output<std::uint8_t, 2>& is_model_node, const std::optional<Input<std::int64_t, 1>>& rows,
           const Input<std::int64_t, 2>& tree_tokens, const Input<std::int64_t, 2>& parent_list,
           const Input<std::int64_t, 2>& top_scores_index, std::int64_t topk,
           const std::optional<Input<std::int64_t, 2>>& ranks, const Input<std::int64_t, 1>& num_kept) {
    const std::size_t n = parents.shape(0), w = parents.shape(1), k = tree_tokens.shape(0);
    require_nodes(parents, num_used);
    require(token_ids.shape(0) == n && token_ids.shape(1) == w && (w == 1 || token_ids.stride(1) == 1) &&
                is_model_node.shape(0) == n && is_model_node.shape(1) == w,
            "nodes need one row per request");
    const EagleArrays trees{tree_tokens, parent_list, top_scores_index, topk, ranks, num_kept};
    require_trees(trees, rows, n);
    TreeMerger merger;
    for (std::size_t i = 0; i < k; ++i) {
        const std::size_t row = rows ? static_cast<std::size_t>(rows->data()[i]) : i;
        std::int64_t& num = at(num_used, row);
        const NodeRow nodes{row_of(token_ids, row), row_of(parents, row), static_cast<std::size_t>(num)};
        num = static_cast<std::int64_t>(merger.merge(nodes, trees.row(i), is_model_node.row(row)));
    }
}

std::size_t num_cells_of(std::span<const std::int64_t> seq_lens, std::size_t w, bool is_full_mask) {
    std::size_t num_cells = seq_lens.size() * w * w;
    for (const std::int64_t len : seq_lens) {
        require(len >= 0, "a length is negative");
        if (is_full_mask) num_cells += w * static_cast<std::size_t>(len);
    }
    return num_cells;
}

// The drafts of a step, merged and laid out. drafts: rows of a HostDrafts. planes: token_ids, parents, positions,
// next_token, next_sibling and retrieve_index of the nodes. With a full mask all of its cells are set first. The
// GIL is released.
void lay_out_drafts(const nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>& draft_tokens,
                    const nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>& draft_parents,
                    std::span<const std::int32_t> num_nodes, std::span<const std::int64_t> roots,
                    std::span<const std::int64_t> seq_lens, const std::optional<Input<std::int64_t, 1>>& rows,
                    const std::optional<Input<std::int64_t, 2>>& tree_tokens,
                    const std::optional<Input<std::int64_t, 2>>& parent_list,
                    const std::optional<Input<std::int64_t, 2>>& top_scores_index, std::int64_t topk,
                    const std::optional<Input<std::int64_t, 2>>& ranks,
                    const std::optional<Input<std::int64_t, 1>>& num_kept,
                    const std::optional<Output<std::uint8_t, 2>>& is_model_node,
                    const Output<std::int64_t, 3>& planes, std::span<std::int64_t> num_used,
                    const Output<std::uint8_t, 1>& mask, bool is_full_mask) {
    const std::size_t n = planes.shape(1), w = planes.shape(2), longest = draft_tokens.shape(1);
    require(planes.shape(0) == 6 && num_nodes.size() == n && roots.size() == n && seq_lens.size() == n &&
                num_used.size() == n && draft_tokens.shape(0) == n && draft_parents.shape(0) == n &&
                draft_parents.shape(1) == longest && longest < w + (n == 0),
            "nodes need one row per request");
    require(longest <= 1 || (draft_tokens.stride(1) == 1 && draft_parents.stride(1) == 1),
            "the nodes of a row must be side by side");
    require(mask.size() >= num_cells_of(seq_lens, w, is_full_mask), "the mask is too small");
    for (std::size_t i = 0; i < n; ++i)
        require(num_nodes[i] >= 0 && static_cast<std::size_t>(num_nodes[i]) <= longest, "a row has room for its draft");
    std::optional<EagleArrays> trees;
    if (tree_tokens) {
        require(parent_list && top_scores_index && num_kept && is_model_node, "trees have all their arrays");
        require(is_model_node->shape(0) == n && is_model_node->shape(1) == w, "nodes need one row per request");
        trees = {*tree_tokens, *parent_list, *top_scores_index, topk, ranks, *num_kept};
        require_trees(*trees, rows, n);
    }
    const nb::gil_scoped_release release;
    const auto plane = [&](std::size_t kind, std::size_t i) {
        return std::span<std::int64_t>{planes.data() + (kind * n + i) * w, w};
    };
    for (std::size_t i = 0; i < n; ++i) {
        const auto from = static_cast<std::int64_t>(i);
        const auto len = static_cast<std::size_t>(num_nodes[i]);
        write_nodes({{draft_tokens.data() + from * draft_tokens.stride(0), len},
                     {draft_parents.data() + from * draft_parents.stride(0), len},
                     roots[i]},
                    plane(0, i), plane(1, i));
        num_used[i] = num_nodes[i] + 1;
        std::iota(plane(5, i).begin(), plane(5, i).end(), static_cast<std::int64_t>(i * w));
    }
    TreeMerger merger;
    for (std::size_t k = 0; trees && k < trees->tokens.shape(0); ++k) {
        const std::size_t i = rows ? static_cast<std::size_t>(rows->data()[k]) : k;
        const NodeRow nodes{plane(0, i), plane(1, i), static_cast<std::size_t>(num_used[i])};
        num_used[i] = static_cast<std::int64_t>(merger.merge(nodes, trees->row(k), is_model_node->row(i)));
    }
    if (is_full_mask) std::memset(mask.data(), 1, mask.size());
    TreeLayouter layouter;
    std::uint8_t* cells = mask.data();
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t before = is_full_mask ? static_cast<std::size_t>(seq_lens[i]) : 0;
        layouter.lay_out(plane(1, i), static_cast<std::size_t>(num_used[i]), seq_lens[i],
                         {plane(2, i), plane(3, i), plane(4, i), cells + before, before + w});
        cells += w * (before + w);
    }
}

void lay_out(const Rows& parents, const Column& num_used, const Input<std::int64_t, 1>& seq_lens,
             const Output<std::int64_t, 2>& positions, const Output<std::int64_t, 2>& next_token,
             const Output<std::int64_t, 2>& next_sibling,
             const Output<std::uint8_t, 1>& mask, bool is_full_mask) {
    const std::size_t n = parents.shape(0), w = parents.shape(1);
    require_nodes(parents, num_used);
    require(seq_lens.size() == n, "each request has its length");
    for (const auto* array : {&positions, &next_token, &next_sibling})
        require(array->shape(0) == n && array->shape(1) == w, "results need one row per request");
    require(mask.size() >= num_cells_of({seq_lens.data(), n}, w, is_full_mask), "the mask is too small");
    TreeLayouter layouter;
    std::uint8_t* cells = mask.data();
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t before = is_full_mask ? static_cast<std::size_t>(seq_lens.data()[i]) : 0;
        layouter.lay_out(row_of(parents, i), static_cast<std::size_t>(at(num_used, i)), seq_lens.data()[i],
                         {positions.row(i), next_token.row(i), next_sibling.row(i), cells + before,
                          before + w});
        cells += w * (before + w);
    }
}

}  // namespace

void bind_trees(nb::module_& m) {
    m.def("merge", &merge, "token_ids"_a.noconvert(), "parents"_a.noconvert(), "num_used"_a.noconvert(),
          "is_model_node"_a, "rows"_a.none(), "tree_tokens"_a, "parent_list"_a,
          "top_scores_index"_a, "topk"_a, "ranks"_a.none(), "num_kept"_a,
          "See host_layout.py.");
    m.def("lay_out_drafts", &lay_out_drafts, "draft_tokens"_a.noconvert(), "draft_parents"_a.noconvert(),
          "num_nodes"_a, "roots"_a, "seq_lens"_a, "rows"_a.none(), "tree_tokens"_a.none(), "parent_list"_a.none(),
          "top_scores_index"_a.none(), "topk"_a, "ranks"_a.none(), "num_kept"_a.none(), "is_model_node"_a.none(),
          "planes"_a, "num_used"_a, "mask"_a, "is_full_mask"_a, "See host_layout.py.");
    m.def("lay_out", &lay_out, "parents"_a.noconvert(), "num_used"_a.noconvert(), "seq_lens"_a, "positions"_a,
          "next_token"_a, "next_sibling"_a, "mask"_a, "is_full_mask"_a, "See host_layout.py.");
}

}  // namespace sglang_hvd
