// The Python bindings of the drafter's step. Conversions and checks of shapes only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "allocation_arrays.hpp"
#include "bindings.hpp"
#include "bound_arrays.hpp"
#include "step_core.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sglang_hvd {
namespace {

using Ints = std::span<const std::int32_t>;
// Predictor, bit, sizes and odds of each source on the device.
using Models = std::vector<std::tuple<nb::object, std::uint8_t, std::vector<std::int32_t>, std::vector<double>>>;

// See StepArrays in proposer.py: arrays that live as long as its object, which this keeps.
struct BoundArrays {
    explicit BoundArrays(nb::object given) : owner(std::move(given)) {
        const auto lens = array_of<std::int32_t, 1>(owner, "draft_lens", 0);
        num_rows = lens.shape(0);
        arrays.draft_lens = lens.data();
        arrays.drafts = rows_of(owner.attr("drafts"), num_rows);
        arrays.votes = rows_of(owner.attr("votes"), num_rows);
        arrays.branches = rows_of(owner.attr("branches"), num_rows);
        arrays.features = array_of<float, 2>(owner, "features", num_rows, kNumDraftFeatures).data();
        const auto positions = array_of<float, 3>(owner, "positions", num_rows, kNumPositionFeatures);
        require(positions.shape(2) == kMaxDepth, "positions need 64 entries of each feature");
        arrays.positions = positions.data();
        arrays.accepted_lens = array_of<float, 1>(owner, "accepted_lens", num_rows).data();
        arrays.acceptance = array_of<float, 2>(owner, "acceptance", num_rows, kMaxDepth).data();
        arrays.tree_acceptance = array_of<float, 2>(owner, "tree_acceptance", num_rows, kMaxDepth).data();
        arrays.model_lens = array_of<float, 1>(owner, "model_lens", num_rows).data();
        const auto probs = array_of<float, 3>(owner, "model_probs", num_rows);
        arrays.num_sizes = probs.shape(1);
        arrays.num_steps = probs.shape(2);
        arrays.model_probs = probs.data();
        const auto if_right = array_of<float, 3>(owner, "model_probs_if_right", num_rows, arrays.num_sizes);
        require(if_right.shape(2) == arrays.num_steps, "both kinds of acceptance have one shape");
        arrays.model_probs_if_right = if_right.data();
        arrays.trees = trees_of(owner.attr("trees"), num_rows);
    }

    nb::object owner;
    std::size_t num_rows = 0;
    StepArrays arrays;
};

// BatchLimits (request.py), whose arrays live as long as the argument, or no limits.
AskedLimits limits_of(nb::handle given, std::size_t num) {
    if (given.is_none()) return {};
    const AskedLimits limits{{array_of<const bool, 1>(given, "are_fixed", num).data(), num},
                             {array_of<const bool, 1>(given, "take_cache", num).data(), num},
                             {array_of<const bool, 1>(given, "take_model", num).data(), num},
                             {array_of<const std::int32_t, 1>(given, "max_tokens", num).data(), num}};
    for (const auto max : limits.max_tokens) require(max >= 0, "a limit is negative");
    return limits;
}

class BoundCore {
public:
    BoundCore(nb::object cache, nb::object tracker, const Models& models, nb::object allocator,
              std::optional<Rule> rule, std::size_t num_sets, std::uint8_t cache_bit, bool asks_votes)
        : core_(nb::cast<CacheCore&>(cache), pointer<Tracker>(tracker), sources_of(models),
                pointer<StepAllocator>(allocator), rule, num_sets, cache_bit, asks_votes),
          kept_{std::move(cache), std::move(tracker), std::move(allocator)} {
        for (const auto& model : models) kept_.push_back(std::get<0>(model));
    }

    void use_predictor(nb::object network, bool is_survival, nb::object calibration) {
        auto* const found = pointer<Network>(network);
        core_.use_predictor(found, is_survival, pointer<Calibration>(calibration));
        predictor_ = {std::move(network), std::move(calibration)};
    }

    void use_arrays(nb::object arrays) { arrays_.emplace(std::move(arrays)); }

    void start(std::int32_t slot, std::int64_t num_tokens) { core_.start(slot, num_tokens); }
    void extend(std::int32_t slot, std::int64_t num_tokens, bool counts) {
        require_started({&slot, 1});
        core_.extend(slot, num_tokens, counts);
    }
    std::int64_t num_tokens(std::int32_t slot) const {
        require_started({&slot, 1});
        return core_.num_tokens(slot);
    }
    void write_lengths(Ints of_cache, std::span<std::int64_t> out) const {
        require_started(of_cache);
        require(out.size() == of_cache.size(), "lengths need one entry per request");
        core_.write_lengths(of_cache, out);
    }
    // Of a request; absent: of all so far.
    std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::int64_t> counts(
        std::optional<std::int32_t> slot) const {
        if (slot) require_started({&*slot, 1});
        const CycleCounts& found = slot ? core_.counts(*slot) : core_.counts_of_all();
        return {found.num_cycles, found.num_accepted, found.num_target_tokens};
    }

    std::tuple<double, double, double> propose(Ints of_cache, Ints of_rest, nb::handle limits, std::int32_t max_chain,
                                               std::optional<std::int32_t> max_branch) {
        const StepSlots slots = checked(of_cache, of_rest);
        const AskedLimits asked = limits_of(limits, slots.size());
        const nb::gil_scoped_release release;
        const auto [propose, features, predict] =
            core_.propose(slots, asked, max_chain, max_branch, arrays_->arrays);
        return {propose, features, predict};
    }

    // costs: None under policies by rule. ints: num_host, num_model, model_size and chain_lens. floats:
    // model_predicted and chain_predicted. bytes: are_trees and host_sources. nodes: tokens and parents. Returns the
    // drafter's bit, its steps, and the largest number of host nodes.
    std::tuple<std::uint8_t, std::int32_t, std::int32_t> choose(
        Ints of_cache, Ints of_rest, nb::handle limits, const BatchCosts* costs, double context, bool next_waits,
        const Output<std::int32_t, 2>& ints, const Output<float, 2>& floats, const Output<std::uint8_t, 2>& bytes,
        const Output<std::int32_t, 3>& nodes) {
        const StepSlots slots = checked(of_cache, of_rest);
        const AskedLimits asked = limits_of(limits, slots.size());
        const std::size_t num = slots.size(), room = arrays_->arrays.drafts.width;
        require(core_.is_by_costs() == (costs != nullptr), "policy allocate needs costs, and no other has them");
        if (costs != nullptr) require_costs(*costs, num);
        require(ints.shape(0) == 4 && ints.shape(1) == num && floats.shape(0) == 2 && floats.shape(1) == num &&
                    bytes.shape(0) == 2 && bytes.shape(1) == num && nodes.shape(0) == 2 && nodes.shape(1) == num &&
                    nodes.shape(2) == room,
                "results need one row per request");
        auto* const flags = reinterpret_cast<bool*>(bytes.row(0).data());
        const StepChoice out{{ints.row(0), ints.row(1), ints.row(2), floats.row(0)},
                             ints.row(3),
                             floats.row(1),
                             {flags, num},
                             bytes.row(1),
                             nodes.row(0).data(),
                             nodes.row(1).data(),
                             room};
        const nb::gil_scoped_release release;
        const ChosenShape found = core_.choose(slots, asked, arrays_->arrays, {costs, context, next_waits}, out);
        return {found.drafter, found.num_steps, found.max_host};
    }

    bool wants_drafts(Ints of_cache, Ints of_rest, nb::handle limits, const BatchCosts& costs, double context) {
        const StepSlots slots = checked(of_cache, of_rest);
        const AskedLimits asked = limits_of(limits, slots.size());
        require(core_.is_by_costs(), "only policy allocate decides by costs");
        require_costs(costs, slots.size());
        const nb::gil_scoped_release release;
        return core_.wants_drafts(slots, asked, arrays_->arrays, {&costs, context});
    }

    bool are_planned(Ints of_cache) const {
        require_started(of_cache);
        for (const auto slot : of_cache)
            if (!core_.is_planned(slot)) return false;
        return true;
    }

    // Returns the fallbacks that changed, as Calibration.observe does.
    std::vector<std::tuple<int, bool, double, double>> commit(
        Ints of_cache, Ints of_rest, std::optional<std::span<const bool>> teaches,
        const Input<std::int32_t, 2>& token_ids, Ints lengths, Ints num_accepted, Ints num_model_accepted) {
        const StepSlots slots{of_cache, of_rest};
        const std::size_t num = slots.size();
        require(of_rest.size() == num && token_ids.shape(0) == num && lengths.size() == num && num_accepted.size() == num &&
                    num_model_accepted.size() == num && (!teaches || teaches->size() == num),
                "committed tokens need one row and one length per request");
        std::vector<std::tuple<int, bool, double, double>> changes;
        const nb::gil_scoped_release release;
        const Committed committed{token_ids.data(), token_ids.shape(1), lengths, num_accepted, num_model_accepted};
        for (const FallbackChange& change : core_.commit(slots, teaches.value_or(std::span<const bool>{}), committed))
            changes.emplace_back(change.origin, change.is_fallback, change.mean_predicted, change.mean_accepted);
        return changes;
    }

private:
    template <typename T>
    static T* pointer(const nb::object& given) {
        return given.is_none() ? nullptr : nb::cast<T*>(given);
    }

    static std::vector<DeviceSource> sources_of(const Models& models) {
        std::vector<DeviceSource> sources;
        for (const auto& [predictor, bit, sizes, odds] : models) {
            require(sizes.size() == odds.size(), "odds need one entry per size");
            sources.push_back({nb::cast<ModelPredictor*>(predictor), bit, sizes, odds});
        }
        return sources;
    }

    void require_started(Ints of_cache) const {
        core_.require_active({of_cache, {}});
    }

    StepSlots checked(Ints of_cache, Ints of_rest) const {
        require(of_cache.size() == of_rest.size(), "each request has both slots");
        require(arrays_ && of_cache.size() <= arrays_->num_rows,
                "the arrays have fewer rows than there are requests");
        core_.require_active({of_cache, of_rest});
        return {of_cache, of_rest};
    }

    void require_costs(const BatchCosts& costs, std::size_t num) const {
        require(costs.num_requests() == num, "the costs are of another batch size");
        require(arrays_->arrays.trees.width == arrays_->arrays.drafts.width, "drafts become trees of their width");
    }

    StepCore core_;
    std::vector<nb::object> kept_;
    std::pair<nb::object, nb::object> predictor_;
    std::optional<BoundArrays> arrays_;
};

}  // namespace

void bind_drafter(nb::module_& m) {
    nb::class_<Rule>(m, "Rule", "See rule.hpp.")
        .def(nb::init<std::string_view, std::optional<double>, double, bool, std::uint8_t, std::int32_t, std::int32_t,
                      std::int32_t>(),
             nb::kw_only(), "policy"_a, "threshold"_a.none(), "min_score"_a, "has_model"_a, "drafter"_a, "room"_a,
             "num_steps"_a, "num_nodes"_a);
    nb::class_<BoundCore>(m, "StepCore", "See step_core.hpp.")
        .def(nb::init<nb::object, nb::object, const Models&, nb::object, std::optional<Rule>, std::size_t,
                      std::uint8_t, bool>(),
             "cache"_a, "tracker"_a.none(), "models"_a, "allocator"_a.none(), "rule"_a.none(), "num_sets"_a,
             "cache_bit"_a, "asks_votes"_a)
        .def("use_predictor", &BoundCore::use_predictor, "network"_a.none(), "is_survival"_a, "calibration"_a.none())
        .def("use_arrays", &BoundCore::use_arrays)
        .def("start", &BoundCore::start)
        .def("extend", &BoundCore::extend)
        .def("num_tokens", &BoundCore::num_tokens)
        .def("write_lengths", &BoundCore::write_lengths)
        .def("counts", &BoundCore::counts, "slot"_a.none())
        .def("propose", &BoundCore::propose, "of_cache"_a, "of_rest"_a, "limits"_a.none(), "max_chain"_a,
             "max_branch"_a.none())
        .def("choose", &BoundCore::choose, "of_cache"_a, "of_rest"_a, "limits"_a.none(), "costs"_a.none(),
             "context"_a, "next_waits"_a, "ints"_a, "floats"_a, "bytes"_a, "nodes"_a)
        .def("wants_drafts", &BoundCore::wants_drafts, "of_cache"_a, "of_rest"_a, "limits"_a.none(), "costs"_a,
             "context"_a)
        .def("are_planned", &BoundCore::are_planned)
        .def("commit", &BoundCore::commit, "of_cache"_a, "of_rest"_a, "teaches"_a.none(), "token_ids"_a, "lengths"_a,
             "num_accepted"_a, "num_model_accepted"_a);
}

}  // namespace sglang_hvd
