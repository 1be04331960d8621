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
#include "bound_arrays.hpp"
#include "host_trees.hpp"
#include "pace.hpp"
#include "step_allocator.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sglang_hvd {
namespace {

template <typename T>
std::span<const T> span_of(const Input<T, 1>& array) {
    return {array.data(), array.size()};
}

bool are_finite(const auto* values, std::size_t num) {
    return std::all_of(values, values + num, [](auto value) { return std::isfinite(value); });
}

template <typename T>
std::vector<T> copy_of(const Input<T, 1>& array) {
    return {array.data(), array.data() + array.size()};
}

bool rises(std::span<const std::int32_t> values) {
    return std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end() &&
           !values.empty() && values.front() >= 1;
}

// Whether the values of each drafter are side by side and rise. drafters: of each value.
bool rises_by_drafter(std::span<const std::int32_t> values, std::span<const std::int32_t> drafters) {
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

BatchCosts costs_of(const Input<std::int32_t, 1>& widths, const Input<double, 1>& step_ms,
                    const Input<std::int32_t, 1>& drafters, const Input<std::int32_t, 1>& num_steps,
                    const Input<std::int32_t, 1>& max_nodes, const Input<double, 2>& draft_ms, double wait_ms) {
    require(std::isfinite(wait_ms) && wait_ms >= 0, "a wait must take a time of 0 or more");
    require(wait_ms == 0 || (widths.size() > 0 && widths.data()[0] == 1), "only plain steps can skip a wait");
    require(widths.size() > 0 && step_ms.size() == widths.size(), "each width needs its time");
    require(num_steps.size() > 0 && draft_ms.shape(0) == num_steps.size() && draft_ms.shape(1) >= 1,
            "drafting needs a time for each round and number of requests");
    require(max_nodes.size() == num_steps.size(), "each round needs its maximum of nodes");
    require(rises(span_of(widths)), "widths must rise from 1 or more");
    require(rises_by_drafter(span_of(num_steps), span_of(drafters)),
            "the numbers of steps of each drafter must rise from 1 or more");
    for (std::size_t w = 0; w < step_ms.size(); ++w)
        require(std::isfinite(step_ms.data()[w]) && step_ms.data()[w] > 0, "a step takes time");
    require(are_finite(draft_ms.data(), draft_ms.size()), "drafting takes time");
    std::vector<Round> rounds;
    for (std::size_t r = 0; r < max_nodes.size(); ++r) {
        require(max_nodes.data()[r] >= 1, "a draft has at least one node");
        rounds.push_back({drafters.data()[r], num_steps.data()[r], max_nodes.data()[r]});
    }
    return {copy_of(widths), copy_of(step_ms), std::move(rounds),
            {draft_ms.data(), draft_ms.data() + draft_ms.size()}, wait_ms};
}

void require_slots(const Pace& pace, const Input<std::int32_t, 1>& slots) {
    for (std::size_t i = 0; i < slots.size(); ++i)
        require(pace.has(slots.data()[i]), "a slot was not started");
}

void write_token_values(const Pace& pace, const Input<std::int32_t, 1>& slots,
                        const Output<double, 1>& values) {
    require(values.size() == slots.size(), "results need one value per request");
    require_slots(pace, slots);
    for (std::size_t i = 0; i < slots.size(); ++i) values.data()[i] = pace.token_value(slots.data()[i]);
}

template <typename Seer>
void see_tokens(Seer& seer, const Pace& pace, const Input<std::int32_t, 1>& slots,
                const Input<std::int32_t, 1>& num_tokens) {
    require(num_tokens.size() == slots.size(), "a cycle commits one number of tokens per request");
    require_slots(pace, slots);
    seer.see_tokens(span_of(slots), span_of(num_tokens));
}

// drafters: of each size.
StepAllocator allocator_of(const Input<std::int32_t, 1>& sizes, const Input<std::int32_t, 1>& drafters,
                           bool merges, int look_after) {
    require(rises_by_drafter(span_of(sizes), span_of(drafters)),
            "the sizes of each drafter must rise from 1 or more");
    std::vector<DraftSize> rows;
    for (std::size_t i = 0; i < sizes.size(); ++i) rows.push_back({sizes.data()[i], drafters.data()[i]});
    return {std::move(rows), merges, look_after};
}

// context_ms: the additional time of a step of this batch for the contexts of its requests.
BatchCosts costs_with(const BatchCosts& of_batch, double context_ms) {
    require(std::isfinite(context_ms) && context_ms >= 0, "contexts must take a time of 0 or more");
    return of_batch.with_context(context_ms);
}

// Of each request: whether its drafts are fixed, then num_host, num_model and max_nodes.
using MaybeLimits = std::optional<
    std::tuple<Input<bool, 1>, Input<std::int32_t, 1>, Input<std::int32_t, 1>, Input<std::int32_t, 1>>>;

// hosts: nodes of each host draft.
RowLimits limits_of(const StepAllocator& allocator, const MaybeLimits& given, const BatchPrediction& hosts,
                    const BatchCosts& costs) {
    if (!given) return {};
    const auto& [are_fixed, num_host, num_model, max_nodes] = *given;
    const std::size_t num = hosts.num_nodes.size();
    require(are_fixed.size() == num && num_host.size() == num && num_model.size() == num && max_nodes.size() == num,
            "limits need one value per request");
    for (std::size_t i = 0; i < num; ++i) {
        require(max_nodes.data()[i] >= 0, "a limit is negative");
        if (!are_fixed.data()[i]) continue;
        const auto of_host = num_host.data()[i], of_model = num_model.data()[i];
        require(of_host >= 0 && of_host <= hosts.num_nodes[i], "a fixed host draft is longer than the draft");
        require(of_model >= 0 && of_model <= allocator.largest_size(0), "a fixed model draft is larger than its sizes");
        require(of_host + of_model < costs.widths.back(), "the widest verification has no room for fixed drafts");
    }
    return {{are_fixed.data(), num}, {num_host.data(), num}, {num_model.data(), num}, {max_nodes.data(), num}};
}

BatchPrediction prediction_of(StepAllocator& allocator, const Input<std::int32_t, 1>& slots,
                  const Input<float, 2>& probs, const Input<std::int32_t, 2>& depths,
                  const Input<std::int32_t, 1>& num_nodes, const Input<float, 3>& model_probs,
                  const Input<float, 3>& model_probs_if_right, const BatchCosts& costs) {
    const std::size_t num = slots.size(), num_sizes = allocator.sizes().size();
    const std::size_t max_steps = model_probs.shape(2), row = probs.shape(1);
    require(costs.num_requests() == num, "the costs are of another batch size");
    require_slots(allocator.pace(), slots);
    require(probs.shape(0) >= num && depths.shape(0) >= num && depths.shape(1) == row && num_nodes.size() >= num,
            "host drafts need one row per request");
    require(model_probs.shape(0) == num && model_probs.shape(1) == num_sizes && model_probs_if_right.shape(0) == num &&
                model_probs_if_right.shape(1) == num_sizes && model_probs_if_right.shape(2) == max_steps,
            "the model drafter needs one entry per request, size and step");
    require(are_finite(model_probs.data(), model_probs.size()) &&
                are_finite(model_probs_if_right.data(), model_probs_if_right.size()),
            "the acceptance of a model draft must be probabilities");
    for (const Round& round : costs.rounds)
        require(static_cast<std::size_t>(round.num_steps) <= max_steps,
                "a drafter may run more steps than its prediction covers");
    for (const DraftSize& size : allocator.sizes())
        require(size.num_nodes < costs.widths.back(), "the widest verification has no room for a draft");
    for (std::size_t i = 0; i < num; ++i) {
        const auto len = num_nodes.data()[i];
        require(len >= 0 && static_cast<std::size_t>(len) <= row, "a draft is longer than its row");
        const std::span nodes(depths.data() + i * row, static_cast<std::size_t>(len));
        for (const auto depth : nodes) require(depth >= 1, "depths are counted from 1");
        require(are_finite(probs.data() + i * row, nodes.size()), "nodes have probabilities");
    }
    return {row,       probs.data(),   depths.data(),          {num_nodes.data(), num},
            max_steps, model_probs.data(), model_probs_if_right.data()};
}

// Places of the width and the round, and the largest number of host nodes that is verified.
std::tuple<std::size_t, std::size_t, std::int32_t> allocate(
    StepAllocator& allocator, const Input<std::int32_t, 1>& slots, const MaybeLimits& limits,
    const Input<float, 2>& probs, const Input<std::int32_t, 2>& depths, const Input<std::int32_t, 1>& num_nodes,
    const Input<float, 3>& model_probs, const Input<float, 3>& model_probs_if_right, const BatchCosts& of_batch,
    double context_ms, bool next_waits, const Output<std::int32_t, 1>& num_host,
    const Output<std::int32_t, 1>& num_model, const Output<std::int32_t, 1>& model_size,
    const Output<float, 1>& model_predicted) {
    const std::size_t num = slots.size();
    const BatchCosts costs = costs_with(of_batch, context_ms);
    const BatchPrediction predicted =
        prediction_of(allocator, slots, probs, depths, num_nodes, model_probs, model_probs_if_right, costs);
    require(num_host.size() == num && num_model.size() == num && model_size.size() == num &&
                model_predicted.size() == num,
            "results need one row per request");
    const StepDrafts out{{num_host.data(), num}, {num_model.data(), num}, {model_size.data(), num},
                         {model_predicted.data(), num}};
    const RowLimits rows = limits_of(allocator, limits, predicted, costs);
    const nb::gil_scoped_release release;
    const StepShape found = allocator.allocate(span_of(slots), rows, predicted, costs, next_waits, out);
    return {found.width, found.round, found.max_host};
}

bool wants_drafts(StepAllocator& allocator, const Input<std::int32_t, 1>& slots, const MaybeLimits& limits,
                  const Input<float, 2>& probs, const Input<std::int32_t, 2>& depths,
                  const Input<std::int32_t, 1>& num_nodes, const Input<float, 3>& model_probs,
                  const Input<float, 3>& model_probs_if_right, const BatchCosts& of_batch, double context_ms) {
    const BatchCosts costs = costs_with(of_batch, context_ms);
    const BatchPrediction predicted =
        prediction_of(allocator, slots, probs, depths, num_nodes, model_probs, model_probs_if_right, costs);
    const RowLimits rows = limits_of(allocator, limits, predicted, costs);
    const nb::gil_scoped_release release;
    return allocator.wants_drafts(span_of(slots), rows, predicted, costs);
}

// The trees of a batch; see TreeRow and HostTrees, whose arrays these are.
struct TreeArrays {
    const Output<std::int32_t, 2>&tokens, &parents, &depths;
    const Output<float, 2>& probs;
    const Output<bool, 2>& is_chain;
    const Output<std::uint8_t, 2>& sources;
    const Output<std::int32_t, 1>& num_nodes;

    std::size_t room() const { return tokens.shape(1); }

    void require_rows(std::size_t num) const {
        const auto has_rows = [&](const auto& array) { return array.shape(0) >= num && array.shape(1) == room(); };
        require(has_rows(tokens) && has_rows(parents) && has_rows(depths) && has_rows(probs) &&
                    has_rows(is_chain) && has_rows(sources) && num_nodes.size() >= num,
                "trees need one row per request");
    }

    TreeRow row(std::size_t i) const {
        const std::size_t at = i * room();
        return {{tokens.data() + at, room()},   {parents.data() + at, room()},  {depths.data() + at, room()},
                {probs.data() + at, room()},    {is_chain.data() + at, room()}, {sources.data() + at, room()}};
    }
};

// The drafts of a batch as trees, to be joined with others.
struct DraftArrays {
    const Input<std::int32_t, 2>&tokens, &parents, &depths;
    const Input<float, 2>& probs;
    const Input<std::int32_t, 1>& num_nodes;

    void require_rows(std::size_t num) const {
        const std::size_t width = tokens.shape(1);
        const auto has_rows = [&](const auto& array) { return array.shape(0) >= num && array.shape(1) == width; };
        require(has_rows(tokens) && has_rows(parents) && has_rows(depths) && has_rows(probs) &&
                    num_nodes.size() >= num,
                "drafts need one row per request");
        for (std::size_t i = 0; i < num; ++i) {
            const auto nodes = num_nodes.data()[i];
            require(nodes >= 0 && static_cast<std::size_t>(nodes) <= width, "a draft is larger than its row");
            for (std::int32_t node = 0; node < nodes; ++node) {
                const std::size_t at = i * width + static_cast<std::size_t>(node);
                require(parents.data()[at] >= -1 && parents.data()[at] < node && depths.data()[at] >= 1,
                        "a node stands after its parent");
            }
        }
    }

    TreeDraft row(std::size_t i) const {
        const std::size_t at = i * tokens.shape(1);
        const auto nodes = static_cast<std::size_t>(num_nodes.data()[i]);
        return {{tokens.data() + at, nodes},
                {parents.data() + at, nodes},
                {depths.data() + at, nodes},
                {probs.data() + at, nodes}};
    }
};

// See HostTrees in host_trees.py. Reuses what it allocates from call to call.
class HostTreeJoiner {
public:
    void join(const Input<std::int32_t, 2>& chain_tokens, const Input<std::int32_t, 1>& chain_lens,
              const Input<float, 2>& acceptance, const Input<std::int32_t, 2>& draft_tokens,
              const Input<std::int32_t, 2>& draft_parents, const Input<std::int32_t, 2>& draft_depths,
              const Input<float, 2>& draft_probs, const Input<std::int32_t, 1>& draft_nodes, std::uint8_t source,
              const Output<std::int32_t, 2>& tokens, const Output<std::int32_t, 2>& parents,
              const Output<std::int32_t, 2>& depths, const Output<float, 2>& probs,
              const Output<bool, 2>& is_chain, const Output<std::uint8_t, 2>& sources,
              const Output<std::int32_t, 1>& num_nodes) {
        const TreeArrays trees{tokens, parents, depths, probs, is_chain, sources, num_nodes};
        const DraftArrays votes{draft_tokens, draft_parents, draft_depths, draft_probs, draft_nodes};
        const std::size_t num = acceptance.shape(0);
        require(chain_tokens.shape(0) >= num && chain_lens.size() >= num, "chains need one row per request");
        for (std::size_t i = 0; i < num; ++i) {
            const auto len = chain_lens.data()[i];
            require(len >= 0 && static_cast<std::size_t>(len) <= chain_tokens.shape(1) &&
                        static_cast<std::size_t>(len) <= acceptance.shape(1),
                    "a chain is longer than its row");
        }
        votes.require_rows(num);
        trees.require_rows(num);
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < num; ++i) {
            const ChainDraft chain{{chain_tokens.data() + i * chain_tokens.shape(1),
                                    static_cast<std::size_t>(chain_lens.data()[i])},
                                   acceptance.data() + i * acceptance.shape(1)};
            num_nodes.data()[i] =
                static_cast<std::int32_t>(joiner_.join(chain, votes.row(i), source, trees.row(i)));
        }
    }

    void add(std::size_t num, const Input<std::int32_t, 2>& draft_tokens, const Input<std::int32_t, 2>& draft_parents,
             const Input<std::int32_t, 2>& draft_depths, const Input<float, 2>& draft_probs,
             const Input<std::int32_t, 1>& draft_nodes, std::uint8_t source, const Output<std::int32_t, 2>& tokens,
             const Output<std::int32_t, 2>& parents, const Output<std::int32_t, 2>& depths,
             const Output<float, 2>& probs, const Output<bool, 2>& is_chain, const Output<std::uint8_t, 2>& sources,
             const Output<std::int32_t, 1>& num_nodes) {
        const TreeArrays trees{tokens, parents, depths, probs, is_chain, sources, num_nodes};
        const DraftArrays drafts{draft_tokens, draft_parents, draft_depths, draft_probs, draft_nodes};
        drafts.require_rows(num);
        trees.require_rows(num);
        for (std::size_t i = 0; i < num; ++i)
            require(num_nodes.data()[i] >= 0 && static_cast<std::size_t>(num_nodes.data()[i]) <= trees.room(),
                    "a tree is larger than its row");
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < num; ++i)
            num_nodes.data()[i] = static_cast<std::int32_t>(joiner_.add(
                trees.row(i), static_cast<std::size_t>(num_nodes.data()[i]), drafts.row(i), source));
    }

    void take(const Input<std::int32_t, 2>& tokens, const Input<std::int32_t, 2>& parents,
              const Input<bool, 2>& is_chain, const Input<std::uint8_t, 2>& sources,
              const Input<float, 2>& acceptance, const Input<std::int32_t, 1>& of_chains,
              const Input<std::int32_t, 1>& num_taken, const Output<std::int32_t, 2>& out_tokens,
              const Output<std::int32_t, 2>& out_parents, const Output<bool, 1>& are_trees,
              const Output<std::uint8_t, 1>& source_sets, const Output<std::int32_t, 1>& chain_lens,
              const Output<float, 1>& chain_predicted) const {
        const std::size_t num = num_taken.size(), room = is_chain.shape(1), width = out_tokens.shape(1);
        for (const auto* array : {&tokens, &parents})
            require(array->shape(0) >= num && array->shape(1) == room, "drafts need one row per request");
        require(is_chain.shape(0) >= num && sources.shape(0) >= num && sources.shape(1) == room &&
                    acceptance.shape(0) >= num && of_chains.size() >= num,
                "drafts need one row per request");
        require(out_tokens.shape(0) == num && out_parents.shape(0) == num && out_parents.shape(1) == width &&
                    are_trees.size() == num && source_sets.size() == num && chain_lens.size() == num &&
                    chain_predicted.size() == num,
                "results need one row per request");
        for (std::size_t i = 0; i < num; ++i)
            require(num_taken.data()[i] >= 0 &&
                        static_cast<std::size_t>(num_taken.data()[i]) <= std::min(room, width),
                    "a draft has fewer nodes");
        for (std::size_t i = 0; i < num; ++i) require(of_chains.data()[i] >= 0, "a chain has tokens or none");
        require(acceptance.shape(1) >= std::max(room, std::size_t{1}), "a chain may be longer than its row");
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < num; ++i) {
            const auto taken = static_cast<std::size_t>(num_taken.data()[i]);
            const std::size_t at = i * room, out = i * width;
            const PartOfTree part = measure({is_chain.data() + at, taken}, {sources.data() + at, taken},
                                            acceptance.data() + i * acceptance.shape(1),
                                            static_cast<std::size_t>(of_chains.data()[i]));
            are_trees.data()[i] = part.is_tree;
            source_sets.data()[i] = part.sources;
            chain_lens.data()[i] = static_cast<std::int32_t>(part.chain_len);
            chain_predicted.data()[i] = static_cast<float>(part.chain_predicted);
            write_row(tokens.data() + at, taken, out_tokens.data() + out, width);
            write_row(parents.data() + at, taken, out_parents.data() + out, width);
        }
    }

private:
    static void write_row(const std::int32_t* from, std::size_t num, std::int32_t* to, std::size_t width) {
        std::copy(from, from + num, to);
        std::fill(to + num, to + width, 0);
    }

    TreeJoiner joiner_;
};

}  // namespace
}  // namespace sglang_hvd

NB_MODULE(_native, m) {
    using namespace sglang_hvd;
    nb::set_leak_warnings(false);  // an interpreter may end before its objects do
    nb::class_<HostTreeJoiner>(m, "HostTreeJoiner", "See host_trees.py, which names things.")
        .def(nb::init<>())
        .def("join", &HostTreeJoiner::join, "chain_tokens"_a.noconvert(), "chain_lens"_a.noconvert(),
             "acceptance"_a.noconvert(), "draft_tokens"_a.noconvert(), "draft_parents"_a.noconvert(),
             "draft_depths"_a.noconvert(), "draft_probs"_a.noconvert(), "draft_nodes"_a.noconvert(), "source"_a,
             "tokens"_a.noconvert(), "parents"_a.noconvert(), "depths"_a.noconvert(), "probs"_a.noconvert(),
             "is_chain"_a.noconvert(), "sources"_a.noconvert(), "num_nodes"_a.noconvert())
        .def("add", &HostTreeJoiner::add, "num"_a, "draft_tokens"_a.noconvert(), "draft_parents"_a.noconvert(),
             "draft_depths"_a.noconvert(), "draft_probs"_a.noconvert(), "draft_nodes"_a.noconvert(), "source"_a,
             "tokens"_a.noconvert(), "parents"_a.noconvert(), "depths"_a.noconvert(), "probs"_a.noconvert(),
             "is_chain"_a.noconvert(), "sources"_a.noconvert(), "num_nodes"_a.noconvert())
        .def("take", &HostTreeJoiner::take, "tokens"_a.noconvert(), "parents"_a.noconvert(),
             "is_chain"_a.noconvert(), "sources"_a.noconvert(), "acceptance"_a.noconvert(),
             "of_chains"_a.noconvert(), "num_taken"_a.noconvert(), "out_tokens"_a.noconvert(),
             "out_parents"_a.noconvert(), "are_trees"_a.noconvert(), "source_sets"_a.noconvert(),
             "chain_lens"_a.noconvert(), "chain_predicted"_a.noconvert());
    nb::class_<Pace>(m, "Pace", "See pace.hpp. Bound for the tests, which have its oracle.")
        .def(nb::init<>())
        .def("start", [](Pace& pace, int slot) {
            require(slot >= 0, "a slot is negative");
            pace.start(slot);
        }, "slot"_a)
        .def("write_token_values", &write_token_values, "slots"_a.noconvert(), "values"_a.noconvert())
        .def("price", &Pace::price, "num_requests"_a, "plain_ms"_a)
        .def("see_step", &Pace::see_step, "ms"_a, "plain_ms"_a)
        .def("see_tokens", [](Pace& pace, const Input<std::int32_t, 1>& slots,
                              const Input<std::int32_t, 1>& num_tokens) {
            see_tokens(pace, pace, slots, num_tokens);
        }, "slots"_a.noconvert(), "num_tokens"_a.noconvert());
    nb::class_<BatchCosts>(m, "BatchCosts", "Times in milliseconds; see StepAllocator._costs_of.")
        .def_static("of", &costs_of, "widths"_a.noconvert(), "step_ms"_a.noconvert(), "drafters"_a.noconvert(),
                    "num_steps"_a.noconvert(), "max_nodes"_a.noconvert(), "draft_ms"_a.noconvert(), "wait_ms"_a);
    nb::class_<StepAllocator>(m, "StepAllocator", "See allocator.py, which names things.")
        .def_static("of", &allocator_of, "sizes"_a.noconvert(), "drafters"_a.noconvert(), "merges"_a, "look_after"_a)
        .def_prop_ro("pace", &StepAllocator::pace)
        .def("start", [](StepAllocator& allocator, int slot) {
            require(slot >= 0, "a slot is negative");
            allocator.pace().start(slot);
        }, "slot"_a)
        .def("see_tokens", [](StepAllocator& allocator, const Input<std::int32_t, 1>& slots,
                              const Input<std::int32_t, 1>& num_tokens) {
            see_tokens(allocator, allocator.pace(), slots, num_tokens);
        }, "slots"_a.noconvert(), "num_tokens"_a.noconvert())
        .def("allocate", &allocate, "slots"_a.noconvert(), "limits"_a.noconvert().none(),
             "probs"_a.noconvert(), "depths"_a.noconvert(), "num_nodes"_a.noconvert(), "model_probs"_a.noconvert(),
             "model_probs_if_right"_a.noconvert(), "costs"_a, "context_ms"_a, "next_waits"_a,
             "num_host"_a.noconvert(), "num_model"_a.noconvert(),
             "model_size"_a.noconvert(), "model_predicted"_a.noconvert())
        .def("wants_drafts", &wants_drafts, "slots"_a.noconvert(), "limits"_a.noconvert().none(),
             "probs"_a.noconvert(), "depths"_a.noconvert(), "num_nodes"_a.noconvert(), "model_probs"_a.noconvert(),
             "model_probs_if_right"_a.noconvert(), "costs"_a, "context_ms"_a);
}
