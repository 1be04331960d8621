// The arrays of allocation/ that several bindings accept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "bound_arrays.hpp"
#include "host_trees.hpp"
#include "step_allocator.hpp"

namespace sglang_hvd {

// The arrays of RowLimits (allocator.py).
class LimitArrays {
public:
    LimitArrays(nanobind::handle limits, std::size_t num)
        : are_fixed_(array_of<const bool, 1>(limits, "are_fixed", num)),
          num_host_(array_of<const std::int32_t, 1>(limits, "num_host", num)),
          num_model_(array_of<const std::int32_t, 1>(limits, "num_model", num)),
          max_nodes_(array_of<const std::int32_t, 1>(limits, "max_nodes", num)) {}

    RowLimits checked(std::span<const std::int32_t> host_nodes, std::int32_t largest_model, std::int32_t widest) const {
        const std::size_t num = host_nodes.size();
        for (std::size_t i = 0; i < num; ++i) {
            require(max_nodes_.data()[i] >= 0, "a limit is negative");
            if (!are_fixed_.data()[i]) continue;
            const auto of_host = num_host_.data()[i], of_model = num_model_.data()[i];
            require(of_host >= 0 && of_host <= host_nodes[i], "a fixed host draft is longer than the draft");
            require(of_model >= 0 && of_model <= largest_model, "a fixed model draft is larger than its sizes");
            require(of_host + of_model < widest, "the widest verification has no room for fixed drafts");
        }
        return {{are_fixed_.data(), num}, {num_host_.data(), num}, {num_model_.data(), num}, {max_nodes_.data(), num}};
    }

private:
    Input<bool, 1> are_fixed_;
    Input<std::int32_t, 1> num_host_, num_model_, max_nodes_;
};

// The arrays of HostTrees (host_trees.py). They live as long as the trees.
inline TreeRows trees_of(nanobind::handle trees, std::size_t num) {
    auto rows = nodes_of<TreeRows>(trees, num);
    rows.is_chain = array_of<bool, 2>(trees, "is_chain", num, rows.width).data();
    rows.sources = array_of<std::uint8_t, 2>(trees, "sources", num, rows.width).data();
    for (std::size_t i = 0; i < num; ++i)
        require(rows.num_nodes[i] >= 0 && static_cast<std::size_t>(rows.num_nodes[i]) <= rows.width,
                "a tree is larger than its row");
    return rows;
}

}  // namespace sglang_hvd
