// The Python face of allocation. Conversions and checks of shapes only.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "allocate.hpp"
#include "cache_trees.hpp"
#include "pace.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sglang_hvd {
namespace {

template <typename T, int kDims>
using Input = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <typename T, int kDims>
using Output = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

void require(bool is_true, const char* message) {
    if (!is_true) throw std::invalid_argument(message);
}

template <typename T>
std::span<const T> span_of(const Input<T, 1>& array) {
    return {array.data(), array.size()};
}

bool are_finite(const auto* values, std::size_t num) {
    return std::all_of(values, values + num, [](auto value) { return std::isfinite(value); });
}

// Reuses what it allocates from call to call.
class BatchAllocator {
public:
    // Places of the width and the number of steps, then how many requests draft with the model, how
    // many verify their cache draft, and the most nodes that any verifies.
    std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t, std::int32_t> allocate(
        const Input<float, 2>& probs, const Input<std::int32_t, 2>& depths,
        const Input<std::int32_t, 1>& num_nodes, const Input<std::int32_t, 1>& sizes,
        const Input<float, 3>& reaches, const Input<float, 3>& reaches_if_right,
        const Input<double, 1>& values, double price, double own_pace,
        const Input<std::int32_t, 1>& widths, const Input<double, 1>& step_ms,
        const Input<std::int32_t, 1>& num_steps,
        const Input<std::int32_t, 1>& most_nodes, const Input<double, 2>& draft_ms, int num_pinned,
        int must_draft, int min_width, int min_steps, bool merges,
        const Output<std::int32_t, 1>& num_cache, const Output<std::int32_t, 1>& num_model,
        const Output<std::int32_t, 1>& model_size, const Output<float, 1>& model_expected) {
        const std::size_t num = values.size(), num_sizes = sizes.size();
        const std::size_t max_steps = reaches.shape(2), row = probs.shape(1);
        require(probs.shape(0) >= num && depths.shape(0) >= num && depths.shape(1) == row &&
                    num_nodes.size() >= num,
                "cache drafts need one row per request");
        require(reaches.shape(0) == num && reaches.shape(1) == num_sizes &&
                    reaches_if_right.shape(0) == num && reaches_if_right.shape(1) == num_sizes &&
                    reaches_if_right.shape(2) == max_steps,
                "the model drafter needs one entry per request, size and step");
        require(widths.size() > 0 && step_ms.size() == widths.size(), "each width needs its time");
        require(num_steps.size() > 0 && num_pinned >= 0 && draft_ms.shape(0) == num_steps.size() &&
                    draft_ms.shape(1) == num + static_cast<std::size_t>(num_pinned) + 1,
                "drafting needs a time for each number of steps and requests");
        require(own_pace >= 0 && own_pace <= 1, "own_pace goes from 0 to 1");
        require(std::isfinite(price) && price > 0, "a millisecond costs something");
        for (std::size_t i = 0; i < num; ++i)
            require(std::isfinite(values.data()[i]) && values.data()[i] > 0, "a token is worth something");
        for (std::size_t w = 0; w < step_ms.size(); ++w)
            require(std::isfinite(step_ms.data()[w]) && step_ms.data()[w] > 0, "a step takes time");
        require(are_finite(draft_ms.data(), draft_ms.size()), "drafting takes time");
        require(are_finite(reaches.data(), reaches.size()) &&
                    are_finite(reaches_if_right.data(), reaches_if_right.size()),
                "what a model draft reaches is a probability");
        require(most_nodes.size() == num_steps.size(), "each number of steps needs its most nodes");
        require(must_draft < static_cast<std::ptrdiff_t>(num), "no such request");
        require(min_width >= 0 && static_cast<std::size_t>(min_width) < widths.size() && min_steps >= 0 &&
                    static_cast<std::size_t>(min_steps) < num_steps.size(),
                "no such width or number of steps");
        require(num_cache.size() == num && num_model.size() == num && model_size.size() == num &&
                    model_expected.size() == num,
                "results need one row per request");
        for (std::size_t w = 0; w < widths.size(); ++w)
            require(widths.data()[w] > (w == 0 ? 0 : widths.data()[w - 1]), "widths must rise from 1 or more");
        for (std::size_t s = 0; s < num_steps.size(); ++s)
            require(num_steps.data()[s] > (s == 0 ? 0 : num_steps.data()[s - 1]) &&
                        static_cast<std::size_t>(num_steps.data()[s]) <= max_steps &&
                        most_nodes.data()[s] >= 1,
                    "numbers of steps must rise, from 1 to as many as are known, with a node or more each");
        cache_.clear();
        model_.clear();
        for (std::size_t i = 0; i < num; ++i) {
            const auto len = num_nodes.data()[i];
            require(len >= 0 && static_cast<std::size_t>(len) <= row, "a draft is longer than its row");
            const std::span nodes(depths.data() + i * row, static_cast<std::size_t>(len));
            for (const auto depth : nodes) require(depth >= 1, "depths are counted from 1");
            require(are_finite(probs.data() + i * row, nodes.size()), "nodes have probabilities");
            cache_.push_back({{probs.data() + i * row, nodes.size()}, nodes});
            for (std::size_t size = 0; size < num_sizes; ++size) {
                const std::size_t first = (i * num_sizes + size) * max_steps;
                require(sizes.data()[size] >= 1, "a draft has at least one node");
                model_.push_back({sizes.data()[size], reaches.data() + first, reaches_if_right.data() + first});
            }
        }
        const BatchCosts costs{span_of(widths), span_of(step_ms), span_of(num_steps), span_of(most_nodes),
                               {draft_ms.data(), draft_ms.size()}};
        const nb::gil_scoped_release release;
        const Allocation& found = allocator_.allocate(
            cache_, model_, num_sizes, max_steps, span_of(values), price, own_pace, costs,
            static_cast<std::size_t>(num_pinned), must_draft, static_cast<std::size_t>(min_width),
            static_cast<std::size_t>(min_steps), merges);
        for (std::size_t i = 0; i < num; ++i) {
            const Choice choice = found.choices[i];
            num_cache.data()[i] = choice.num_cache;
            num_model.data()[i] = model_size.data()[i] = 0;
            model_expected.data()[i] = 0;
            if (choice.model_size < 0) continue;
            const ModelNodes& model = model_[i * num_sizes + static_cast<std::size_t>(choice.model_size)];
            num_model.data()[i] = sglang_hvd::num_nodes(model, costs, found.steps);
            model_size.data()[i] = model.num_nodes;
            model_expected.data()[i] =
                static_cast<float>(expect_model(model, num_steps.data()[found.steps]));
        }
        const StepCounts counts = count(found, model_, num_sizes, costs);
        return {static_cast<std::int32_t>(found.width), static_cast<std::int32_t>(found.steps),
                counts.num_drafting, counts.num_cached, counts.most_nodes};
    }

private:
    Allocator allocator_;
    std::vector<CacheNodes> cache_;
    std::vector<ModelNodes> model_;
};

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

void see_tokens(Pace& pace, const Input<std::int32_t, 1>& slots,
                const Input<std::int32_t, 1>& num_tokens) {
    require(num_tokens.size() == slots.size(), "a cycle commits one number of tokens per request");
    require_slots(pace, slots);
    pace.see_tokens(span_of(slots), span_of(num_tokens));
}

// Reuses what it allocates from call to call.
class CacheTreeJoiner {
public:
    void join(const Input<std::int32_t, 2>& chain_tokens, const Input<std::int32_t, 1>& chain_lens,
              const Input<float, 2>& survival, const Input<std::int32_t, 2>& tokens,
              const Input<std::int32_t, 2>& parents, const Input<std::int32_t, 2>& depths,
              const Input<float, 2>& probs, const Input<std::int32_t, 1>& num_nodes, float branch_share,
              const Output<std::int32_t, 2>& out_tokens, const Output<std::int32_t, 2>& out_parents,
              const Output<std::int32_t, 2>& out_depths, const Output<float, 2>& out_probs,
              const Output<bool, 2>& out_is_chain, const Output<std::int32_t, 1>& out_num) {
        const std::size_t num = survival.shape(0), room = out_tokens.shape(1), row = tokens.shape(1);
        require(chain_tokens.shape(0) >= num && chain_lens.size() >= num, "chains need one row per request");
        for (const auto* array : {&tokens, &parents, &depths})
            require(array->shape(0) >= num && array->shape(1) == row, "votes need one row per request");
        require(probs.shape(0) >= num && probs.shape(1) == row && num_nodes.size() >= num,
                "votes need one row per request");
        for (const auto* array : {&out_tokens, &out_parents, &out_depths})
            require(array->shape(0) >= num && array->shape(1) == room, "results need one row per request");
        require(out_probs.shape(0) >= num && out_probs.shape(1) == room && out_is_chain.shape(0) >= num &&
                    out_is_chain.shape(1) == room && out_num.size() >= num,
                "results need one row per request");
        for (std::size_t i = 0; i < num; ++i) {
            const auto len = chain_lens.data()[i], nodes = num_nodes.data()[i];
            require(len >= 0 && static_cast<std::size_t>(len) <= chain_tokens.shape(1) &&
                        static_cast<std::size_t>(len) <= survival.shape(1),
                    "a chain is longer than its row");
            require(nodes >= 0 && static_cast<std::size_t>(nodes) <= row, "a tree is larger than its row");
            for (std::int32_t node = 0; node < nodes; ++node) {
                const std::size_t at = i * row + static_cast<std::size_t>(node);
                require(parents.data()[at] >= -1 && parents.data()[at] < node && depths.data()[at] >= 1,
                        "a node stands after its parent");
            }
        }
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < num; ++i) {
            const auto len = static_cast<std::size_t>(chain_lens.data()[i]);
            const auto nodes = static_cast<std::size_t>(num_nodes.data()[i]);
            const std::size_t at = i * row, out = i * room;
            const ChainDraft chain{{chain_tokens.data() + i * chain_tokens.shape(1), len},
                                   survival.data() + i * survival.shape(1)};
            const VotesTree votes{{tokens.data() + at, nodes},
                                  {parents.data() + at, nodes},
                                  {depths.data() + at, nodes},
                                  {probs.data() + at, nodes}};
            const TreeRow result{{out_tokens.data() + out, room},
                                 {out_parents.data() + out, room},
                                 {out_depths.data() + out, room},
                                 {out_probs.data() + out, room},
                                 {out_is_chain.data() + out, room}};
            out_num.data()[i] = static_cast<std::int32_t>(joiner_.join(chain, votes, branch_share, result));
        }
    }

    void measure(const Input<float, 2>& probs, const Input<bool, 2>& is_chain,
                 const Input<float, 2>& survival, const Input<std::int32_t, 1>& num_taken,
                 const Output<std::int32_t, 1>& chain_lens,
                 const Output<float, 1>& scores, const Output<float, 1>& expected,
                 const Output<float, 1>& branch_expected) const {
        const std::size_t num = num_taken.size(), room = probs.shape(1);
        require(probs.shape(0) >= num && is_chain.shape(0) >= num && is_chain.shape(1) == room &&
                    survival.shape(0) >= num,
                "drafts need one row per request");
        require(chain_lens.size() == num && scores.size() == num && expected.size() == num &&
                    branch_expected.size() == num,
                "results need one row per request");
        for (std::size_t i = 0; i < num; ++i)
            require(num_taken.data()[i] >= 0 && static_cast<std::size_t>(num_taken.data()[i]) <= room,
                    "a draft has fewer nodes");
        require(survival.shape(1) >= room, "a chain may be longer than its row");
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < num; ++i) {
            const auto taken = static_cast<std::size_t>(num_taken.data()[i]);
            const PartOfTree part = sglang_hvd::measure({probs.data() + i * room, taken},
                                                        {is_chain.data() + i * room, taken},
                                                        survival.data() + i * survival.shape(1));
            chain_lens.data()[i] = static_cast<std::int32_t>(part.chain_len);
            scores.data()[i] = static_cast<float>(part.score);
            expected.data()[i] = static_cast<float>(part.chain_expected);
            branch_expected.data()[i] = static_cast<float>(part.branch_expected);
        }
    }

private:
    TreeJoiner joiner_;
};

}  // namespace
}  // namespace sglang_hvd

NB_MODULE(_native, m) {
    using namespace sglang_hvd;
    nb::class_<CacheTreeJoiner>(m, "CacheTreeJoiner", "See cache_trees.py, which names things.")
        .def(nb::init<>())
        .def("join", &CacheTreeJoiner::join, "chain_tokens"_a.noconvert(), "chain_lens"_a.noconvert(),
             "survival"_a.noconvert(), "tokens"_a.noconvert(), "parents"_a.noconvert(),
             "depths"_a.noconvert(), "probs"_a.noconvert(), "num_nodes"_a.noconvert(), "branch_share"_a,
             "out_tokens"_a.noconvert(), "out_parents"_a.noconvert(), "out_depths"_a.noconvert(),
             "out_probs"_a.noconvert(), "out_is_chain"_a.noconvert(), "out_num"_a.noconvert())
        .def("measure", &CacheTreeJoiner::measure, "probs"_a.noconvert(), "is_chain"_a.noconvert(),
             "survival"_a.noconvert(), "num_taken"_a.noconvert(), "chain_lens"_a.noconvert(),
             "scores"_a.noconvert(), "expected"_a.noconvert(), "branch_expected"_a.noconvert());
    nb::class_<Pace>(m, "Pace", "See pace.hpp, which names things.")
        .def(nb::init<>())
        .def("start", [](Pace& pace, int slot) {
            require(slot >= 0, "a slot is negative");
            pace.start(slot);
        }, "slot"_a)
        .def("write_token_values", &write_token_values, "slots"_a.noconvert(), "values"_a.noconvert())
        .def("price", &Pace::price, "num_requests"_a, "plain_ms"_a)
        .def("see_step", &Pace::see_step, "ms"_a, "plain_ms"_a)
        .def("see_tokens", &see_tokens, "slots"_a.noconvert(), "num_tokens"_a.noconvert());
    nb::class_<BatchAllocator>(m, "Allocator", "See allocator.py, which names things.")
        .def(nb::init<>())
        .def("allocate", &BatchAllocator::allocate, "probs"_a.noconvert(), "depths"_a.noconvert(),
             "num_nodes"_a.noconvert(), "sizes"_a.noconvert(), "reaches"_a.noconvert(),
             "reaches_if_right"_a.noconvert(), "values"_a.noconvert(), "price"_a, "own_pace"_a,
             "widths"_a.noconvert(), "step_ms"_a.noconvert(), "num_steps"_a.noconvert(), "most_nodes"_a.noconvert(),
             "draft_ms"_a.noconvert(),
             "num_pinned"_a, "must_draft"_a, "min_width"_a, "min_steps"_a, "merges"_a,
             "num_cache"_a.noconvert(), "num_model"_a.noconvert(), "model_size"_a.noconvert(),
             "model_expected"_a.noconvert());
}
