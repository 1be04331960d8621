// The Python bindings of allocation. Conversions and checks of shapes only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "allocate.hpp"
#include "allocation_arrays.hpp"
#include "bindings.hpp"
#include "bound_arrays.hpp"
#include "host_trees.hpp"
#include "pace.hpp"
#include "step_allocator.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sglang_hvd {
namespace {

using Ints = std::span<const std::int32_t>;

bool are_finite(const auto* values, std::size_t num) {
    return std::all_of(values, values + num, [](auto value) { return std::isfinite(value); });
}

bool rises(Ints values) {
    return std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end() &&
           !values.empty() && values.front() >= 1;
}

// Whether the values of each drafter are side by side and rise. drafters: of each value.
bool rises_by_drafter(Ints values, Ints drafters) {
    if (values.empty() || drafters.size() != values.size() || drafters.front() != 0) return false;
    std::size_t first = 0;
    for (std::size_t i = 1; i <= values.size(); ++i) {
        if (i < values.size() && drafters[i] == drafters[first]) continue;
        if (!rises(values.subspan(first, i - first))) return false;
        if (i < values.size() && drafters[i] != drafters[first] + 1) return false;
        first = i;
    }
    return true;
}

BatchCosts costs_of(Ints widths, std::span<const double> step_ms, Ints drafters, Ints num_steps, Ints max_nodes,
                    const Input<double, 2>& draft_ms, double wait_ms) {
    require(std::isfinite(wait_ms) && wait_ms >= 0, "a wait must take a time of 0 or more");
    require(wait_ms == 0 || (!widths.empty() && widths.front() == 1), "only plain steps can skip a wait");
    require(!widths.empty() && step_ms.size() == widths.size(), "each width needs its time");
    require(!num_steps.empty() && draft_ms.shape(0) == num_steps.size() && draft_ms.shape(1) >= 1,
            "drafting needs a time for each round and number of requests");
    require(max_nodes.size() == num_steps.size(), "each round needs its maximum of nodes");
    require(rises(widths), "widths must rise from 1 or more");
    require(rises_by_drafter(num_steps, drafters), "the numbers of steps of each drafter must rise from 1 or more");
    for (const double ms : step_ms) require(std::isfinite(ms) && ms > 0, "a step takes time");
    require(are_finite(draft_ms.data(), draft_ms.size()), "drafting takes time");
    std::vector<Round> rounds;
    for (std::size_t r = 0; r < max_nodes.size(); ++r) {
        require(max_nodes[r] >= 1, "a draft has at least one node");
        rounds.push_back({drafters[r], num_steps[r], max_nodes[r]});
    }
    return {{widths.begin(), widths.end()}, {step_ms.begin(), step_ms.end()}, std::move(rounds),
            {draft_ms.data(), draft_ms.data() + draft_ms.size()}, wait_ms};
}

void require_slots(const Pace& pace, Ints slots) {
    for (const auto slot : slots) require(pace.has(slot), "a slot was not started");
}

void write_token_values(const Pace& pace, Ints slots, std::span<double> values) {
    require(values.size() == slots.size(), "results need one value per request");
    require_slots(pace, slots);
    for (std::size_t i = 0; i < slots.size(); ++i) values[i] = pace.token_value(slots[i]);
}

template <typename Seer>
void see_tokens(Seer& seer, const Pace& pace, Ints slots, Ints num_tokens) {
    require(num_tokens.size() == slots.size(), "a cycle commits one number of tokens per request");
    require_slots(pace, slots);
    seer.see_tokens(slots, num_tokens);
}

void start(Pace& pace, int slot) {
    require(slot >= 0, "a slot is negative");
    pace.start(slot);
}

// drafters: of each size.
StepAllocator allocator_of(Ints sizes, Ints drafters, bool merges, int look_after) {
    require(rises_by_drafter(sizes, drafters), "the sizes of each drafter must rise from 1 or more");
    std::vector<DraftSize> rows;
    for (std::size_t i = 0; i < sizes.size(); ++i) rows.push_back({sizes[i], drafters[i]});
    return {std::move(rows), merges, look_after};
}

// context_ms: the additional time of a step of this batch for the contexts of its requests.
BatchCosts costs_with(const BatchCosts& of_batch, double context_ms) {
    require(std::isfinite(context_ms) && context_ms >= 0, "contexts must take a time of 0 or more");
    return of_batch.with_context(context_ms);
}

// The arrays of PredictedDrafts (allocator.py).
class PredictionArrays {
public:
    PredictionArrays(nb::handle predicted, std::size_t num, std::size_t num_sizes)
        : probs_(array_of<const float, 2>(predicted, "probs", num)),
          depths_(array_of<const std::int32_t, 2>(predicted, "depths", num, probs_.shape(1))),
          num_nodes_(array_of<const std::int32_t, 1>(predicted, "num_nodes", num)),
          model_probs_(array_of<const float, 3>(predicted, "model_probs", num, num_sizes)),
          model_probs_if_right_(array_of<const float, 3>(predicted, "model_probs_if_right", num, num_sizes)) {
        require(model_probs_.shape(0) == num && model_probs_if_right_.shape(0) == num &&
                    model_probs_if_right_.shape(2) == max_steps(),
                "the model drafter needs one entry per request, size and step");
        for (const auto* array : {&model_probs_, &model_probs_if_right_})
            require(are_finite(array->data(), array->size()),
                    "the acceptance of a model draft must be probabilities");
        for (std::size_t i = 0; i < num; ++i) {
            const auto len = num_nodes_.data()[i];
            require(len >= 0 && static_cast<std::size_t>(len) <= probs_.shape(1), "a draft is longer than its row");
            for (const auto depth : depths_.row(i).first(static_cast<std::size_t>(len)))
                require(depth >= 1, "depths are counted from 1");
            require(are_finite(probs_.row(i).data(), static_cast<std::size_t>(len)), "nodes have probabilities");
        }
    }

    std::size_t max_steps() const { return model_probs_.shape(2); }

    BatchPrediction values() const {
        return {probs_.shape(1), probs_.data(),       depths_.data(), {num_nodes_.data(), model_probs_.shape(0)},
                max_steps(),     model_probs_.data(), model_probs_if_right_.data()};
    }

private:
    Input<float, 2> probs_;
    Input<std::int32_t, 2> depths_;
    Input<std::int32_t, 1> num_nodes_;
    Input<float, 3> model_probs_, model_probs_if_right_;
};

// What a batch is allocated from, checked.
struct Batch {
    // limits: None or RowLimits.
    // context_ms: the additional time of a step of this batch for the contexts of its requests.
    Batch(StepAllocator& allocator, Ints slots, nb::handle limits, nb::handle predicted,
          const BatchCosts& of_batch, double context_ms)
        : prediction(predicted, slots.size(), allocator.sizes().size()), costs(costs_with(of_batch, context_ms)) {
        require(costs.num_requests() == slots.size(), "the costs are of another batch size");
        require_slots(allocator.pace(), slots);
        for (const Round& round : costs.rounds)
            require(static_cast<std::size_t>(round.num_steps) <= prediction.max_steps(),
                    "a drafter may run more steps than its prediction covers");
        for (const DraftSize& size : allocator.sizes())
            require(size.num_nodes < costs.widths.back(), "the widest verification has no room for a draft");
        if (limits.is_none()) return;
        limit_arrays.emplace(limits, slots.size());
        rows = limit_arrays->checked(prediction.values().num_nodes, allocator.largest_size(0), costs.widths.back());
    }

    PredictionArrays prediction;
    BatchCosts costs;
    std::optional<LimitArrays> limit_arrays;
    RowLimits rows;
};

// Places of the width and the round, and the largest number of host nodes that is verified.
std::tuple<std::size_t, std::size_t, std::int32_t> allocate(
    StepAllocator& allocator, Ints slots, nb::handle limits, nb::handle predicted, const BatchCosts& of_batch, double context_ms, bool next_waits,
    std::span<std::int32_t> num_host, std::span<std::int32_t> num_model, std::span<std::int32_t> model_size,
    std::span<float> model_predicted) {
    const Batch batch(allocator, slots, limits, predicted, of_batch, context_ms);
    for (const std::size_t size : {num_host.size(), num_model.size(), model_size.size(), model_predicted.size()})
        require(size == slots.size(), "results need one row per request");
    const StepDrafts out{num_host, num_model, model_size, model_predicted};
    const nb::gil_scoped_release release;
    const StepShape found =
        allocator.allocate(slots, batch.rows, batch.prediction.values(), batch.costs, next_waits, out);
    return {found.width, found.round, found.max_host};
}

bool wants_drafts(StepAllocator& allocator, Ints slots, nb::handle limits, nb::handle predicted, const BatchCosts& of_batch, double context_ms) {
    const Batch batch(allocator, slots, limits, predicted, of_batch, context_ms);
    const nb::gil_scoped_release release;
    return allocator.wants_drafts(slots, batch.rows, batch.prediction.values(), batch.costs);
}

// The drafts of a DraftBatch, to be joined with others as trees.
DraftRows drafts_of(nb::handle batch, std::size_t num) {
    const DraftRows drafts = rows_of(batch, num);
    require_lengths(drafts, num);
    for (std::size_t i = 0; i < num; ++i) {
        const TreeDraft tree = tree_of(drafts, i);
        for (std::size_t node = 0; node < tree.tokens.size(); ++node)
            require(tree.parents[node] >= -1 && tree.parents[node] < static_cast<std::int32_t>(node) &&
                        tree.depths[node] >= 1,
                    "a node stands after its parent");
    }
    return drafts;
}

// See HostTrees in host_trees.py. Reuses what it allocates from call to call.
class HostTreeJoiner {
public:
    void join(nb::handle chains, const Input<float, 2>& acceptance, nb::handle votes_batch, std::uint8_t source,
              nb::handle host_trees) {
        const std::size_t num = acceptance.shape(0);
        const auto chain_tokens = array_of<const std::int32_t, 2>(chains, "token_ids", num);
        const auto chain_lens = array_of<const std::int32_t, 1>(chains, "num_nodes", num);
        for (std::size_t i = 0; i < num; ++i) {
            const auto len = chain_lens.data()[i];
            require(len >= 0 && static_cast<std::size_t>(len) <= chain_tokens.shape(1) &&
                        static_cast<std::size_t>(len) <= acceptance.shape(1),
                    "a chain is longer than its row");
        }
        const DraftRows votes = drafts_of(votes_batch, num);
        const TreeRows trees = trees_of(host_trees, num);
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < num; ++i) {
            const auto len = static_cast<std::size_t>(chain_lens.data()[i]);
            const ChainDraft chain{chain_tokens.row(i).first(len), acceptance.row(i).data()};
            trees.num_nodes[i] =
                static_cast<std::int32_t>(joiner_.join(chain, tree_of(votes, i), source, trees.row(i)));
        }
    }

    void add(std::size_t num, nb::handle batch, std::uint8_t source, nb::handle host_trees) {
        const DraftRows drafts = drafts_of(batch, num);
        const TreeRows trees = trees_of(host_trees, num);
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < num; ++i) {
            auto& num_nodes = trees.num_nodes[i];
            num_nodes = static_cast<std::int32_t>(
                joiner_.add(trees.row(i), static_cast<std::size_t>(num_nodes), tree_of(drafts, i), source));
        }
    }

    void take(nb::handle host_trees, const Input<float, 2>& acceptance, nb::handle chains,
              Ints num_taken, const Output<std::int32_t, 2>& out_tokens,
              const Output<std::int32_t, 2>& out_parents, std::span<bool> are_trees,
              std::span<std::uint8_t> source_sets, std::span<std::int32_t> chain_lens,
              std::span<float> chain_predicted) const {
        const std::size_t num = num_taken.size(), width = out_tokens.shape(1);
        const TreeRows trees = trees_of(host_trees, num);
        const auto of_chains = array_of<const std::int32_t, 1>(chains, "num_nodes", num);
        require(acceptance.shape(0) >= num, "drafts need one row per request");
        require(out_tokens.shape(0) == num && out_parents.shape(0) == num && out_parents.shape(1) == width &&
                    are_trees.size() == num && source_sets.size() == num && chain_lens.size() == num &&
                    chain_predicted.size() == num,
                "results need one row per request");
        for (std::size_t i = 0; i < num; ++i) {
            require(num_taken[i] >= 0 && static_cast<std::size_t>(num_taken[i]) <= std::min(trees.width, width),
                    "a draft has fewer nodes");
            require(of_chains.data()[i] >= 0, "a chain has tokens or none");
        }
        require(acceptance.shape(1) >= std::max(trees.width, std::size_t{1}), "a chain may be longer than its row");
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < num; ++i) {
            const auto taken = static_cast<std::size_t>(num_taken[i]);
            const TreeRow tree = trees.row(i);
            const PartOfTree part = measure(tree.is_chain.first(taken), tree.sources.first(taken),
                                            acceptance.row(i).data(),
                                            static_cast<std::size_t>(of_chains.data()[i]));
            are_trees[i] = part.is_tree;
            source_sets[i] = part.sources;
            chain_lens[i] = static_cast<std::int32_t>(part.chain_len);
            chain_predicted[i] = static_cast<float>(part.chain_predicted);
            write_row(tree.tokens.first(taken), out_tokens.row(i));
            write_row(tree.parents.first(taken), out_parents.row(i));
        }
    }

private:
    static void write_row(Ints from, std::span<std::int32_t> to) {
        std::fill(std::copy(from.begin(), from.end(), to.begin()), to.end(), 0);
    }

    TreeJoiner joiner_;
};

}  // namespace

void bind_allocation(nb::module_& m) {
    nb::class_<HostTreeJoiner>(m, "HostTreeJoiner", "See host_trees.py, which names things.")
        .def(nb::init<>())
        .def("join", &HostTreeJoiner::join)
        .def("add", &HostTreeJoiner::add)
        .def("take", &HostTreeJoiner::take);
    nb::class_<Pace>(m, "Pace", "See pace.hpp. Bound for the tests, which have its oracle.")
        .def(nb::init<>())
        .def("start", &start)
        .def("write_token_values", &write_token_values)
        .def("price", &Pace::price, "num_requests"_a, "plain_ms"_a)
        .def("see_step", &Pace::see_step, "ms"_a, "plain_ms"_a)
        .def("see_tokens", [](Pace& pace, Ints slots, Ints num_tokens) { see_tokens(pace, pace, slots, num_tokens); });
    nb::class_<BatchCosts>(m, "BatchCosts", "Times in milliseconds; see StepAllocator._costs_of.")
        .def_static("of", &costs_of);
    nb::class_<StepAllocator>(m, "StepAllocator", "See allocator.py, which names things.")
        .def_static("of", &allocator_of)
        .def_prop_ro("pace", &StepAllocator::pace)
        .def("start", [](StepAllocator& allocator, int slot) { start(allocator.pace(), slot); })
        .def("see_tokens", [](StepAllocator& allocator, Ints slots, Ints num_tokens) {
            see_tokens(allocator, allocator.pace(), slots, num_tokens);
        })
        .def("allocate", &allocate, "slots"_a, "limits"_a.none(), "predicted"_a, "costs"_a, "context_ms"_a,
             "next_waits"_a, "num_host"_a, "num_model"_a, "model_size"_a, "model_predicted"_a)
        .def("wants_drafts", &wants_drafts, "slots"_a, "limits"_a.none(), "predicted"_a, "costs"_a,
             "context_ms"_a);
}

}  // namespace sglang_hvd
