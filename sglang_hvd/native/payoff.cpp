// Python bindings of features, inference, calibration and the model drafter's prediction. They only convert
// arrays and check shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "bound_arrays.hpp"
#include "calibration.hpp"
#include "features.hpp"
#include "model_predictor.hpp"
#include "network.hpp"
#include "predictions.hpp"
#include "tracker.hpp"

namespace nb = nanobind;

namespace sglang_hvd {
namespace {

using Ints = std::span<const std::int32_t>;  // by request, unless it says otherwise

// The committed tokens of a step: the first lengths[i] tokens of row i belong to request i.
class CommittedTokens {
public:
    CommittedTokens(const Input<std::int32_t, 2>& tokens, Ints lengths, std::size_t num)
        : tokens_(tokens), lengths_(lengths) {
        require(tokens.shape(0) == num && lengths.size() == num,
                "committed tokens need one row and one length per request");
        for (const int length : lengths)
            require(length >= 0 && static_cast<std::size_t>(length) <= tokens.shape(1),
                    "a length is negative or exceeds its row of tokens");
    }

    Ints of(std::size_t row) const { return tokens_.row(row).first(static_cast<std::size_t>(lengths_[row])); }

private:
    const Input<std::int32_t, 2>& tokens_;
    Ints lengths_;
};

void require_positions(const auto& positions, std::size_t num) {
    require(positions.shape(0) >= num && positions.shape(1) == kNumPositionFeatures &&
                positions.shape(2) == kMaxDepth,
            "positions need float32[num_requests, num_position_features, 64]");
}

void commit(Tracker& tracker, Ints slots, const Input<std::int32_t, 2>& tokens, Ints lengths, Ints verified_lens,
            std::span<std::int32_t> accepted_lens) {
    const CommittedTokens committed(tokens, lengths, slots.size());
    require(verified_lens.size() == slots.size() && accepted_lens.size() == slots.size(),
            "committed tokens need one verified and one accepted length per request");
    for (const int slot : slots) tracker.at(slot);
    for (std::size_t i = 0; i < slots.size(); ++i)
        accepted_lens[i] = tracker.commit(slots[i], committed.of(i), verified_lens[i]);
}

void write_features(Tracker& tracker, Ints slots, nb::handle drafts_batch, nb::handle votes_batch,
                    const Output<float, 2>& features, const Output<float, 3>& positions) {
    const std::size_t num = slots.size();
    const DraftRows drafts = rows_of(drafts_batch, num), votes = rows_of(votes_batch, num);
    require_lengths(drafts, num);
    require_lengths(votes, num);
    require(features.shape(0) >= num && features.shape(1) == kNumDraftFeatures,
            "features need float32[num_requests, num_features]");
    require_positions(positions, num);
    tracker.write(slots, drafts, votes, features.data(), positions.data());
}

Network network_of(std::span<const float> mean, std::span<const float> std,
                   const std::vector<Input<float, 2>>& weights,
                   const std::vector<std::span<const float>>& biases) {
    require(mean.size() == std.size() && weights.size() == biases.size() && !weights.empty(),
            "a network needs as many means as deviations, and as many biases as weights");
    Network network(mean, std);
    std::size_t num_in = mean.size();
    for (std::size_t i = 0; i < weights.size(); ++i) {
        require(weights[i].shape(1) == num_in && weights[i].shape(0) == biases[i].size() && !biases[i].empty(),
                "a layer's weights do not fit the layer before or its biases");
        network.add_layer({weights[i].data(), weights[i].size()}, biases[i]);
        num_in = biases[i].size();
    }
    return network;
}

void predict_of_kind_survival(Network& network, const Input<float, 2>& features, const Input<float, 3>& positions,
                              Ints num_tokens, std::span<float> accepted_lens, const Output<float, 2>& acceptance) {
    const std::size_t num = num_tokens.size();
    require(features.shape(0) >= num && features.shape(1) >= network.num_in() &&
                network.num_out() == kNumBuckets + kNumPositionFeatures,
            "features do not fit the network");
    require_positions(positions, num);
    require(accepted_lens.size() >= num && acceptance.shape(0) >= num && acceptance.shape(1) == kMaxDepth,
            "results need one row per request");
    predict_acceptance(network, features.data(), features.shape(1), positions.data(), num_tokens,
                       accepted_lens.data(), acceptance.data());
}

void predict_of_kind_mlp(Network& network, const Input<float, 2>& features, std::span<float> accepted_lens) {
    require(features.shape(0) >= accepted_lens.size() && features.shape(1) >= network.num_in() &&
                network.num_out() == 1,
            "features do not fit the network");
    predict_lens(network, features.data(), features.shape(1), accepted_lens);
}

// The acceptance of cache drafts; null with a predictor of bare lengths.
template <typename T>
T* acceptance_of(const std::optional<Output<T, 2>>& rows, std::size_t num) {
    require(!rows || (rows->shape(0) >= num && rows->shape(1) == kMaxDepth),
            "acceptance needs float32[num_requests, 64]");
    return rows ? rows->data() : nullptr;
}
using MaybeAcceptance = std::optional<Input<float, 2>>;

DraftRows drafts_of(nb::handle batch, std::size_t num) {
    const DraftRows drafts = rows_of(batch, num);
    require_lengths(drafts, num);
    return drafts;
}

void correct_batch(Calibration& calibration, Ints slots, nb::handle batch, std::span<float> accepted_lens,
                   const std::optional<Output<float, 2>>& acceptance) {
    require(accepted_lens.size() >= slots.size(), "accepted_lens do not fit the requests");
    for (const int slot : slots) require(slot >= 0, "slots must not be negative");
    correct_all(calibration, slots, drafts_of(batch, slots.size()), accepted_lens.data(),
                acceptance_of(acceptance, slots.size()));
}

// Returns the fallbacks that changed: origin, whether it is on, mean predicted and mean accepted tokens.
std::vector<std::tuple<int, bool, double, double>> observe_cache(
    Calibration& calibration, Ints slots, const Input<std::int32_t, 2>& token_ids, Ints lengths,
    Ints accepted_lens, Ints verified_lens, std::span<const float> predicted) {
    const std::size_t num = slots.size();
    const CommittedTokens committed(token_ids, lengths, num);
    require(accepted_lens.size() == num && verified_lens.size() == num && predicted.size() == num,
            "accepted_lens, verified_lens and predicted need one entry per request");
    std::vector<std::tuple<int, bool, double, double>> changes;
    for (std::size_t i = 0; i < num; ++i) {
        std::optional<VerifiedCacheDraft> verified;
        if (verified_lens[i] > 0) verified = {accepted_lens[i], verified_lens[i], predicted[i]};
        if (const auto change = calibration.observe(slots[i], committed.of(i), verified))
            changes.emplace_back(change->origin, change->is_fallback, change->mean_predicted,
                                 change->mean_accepted);
    }
    return changes;
}

std::tuple<double, double, double> sums_of(const RunningReliability& sums) {
    return {sums.weight, sums.predicted, sums.observed};
}

// Learns from the cycles that verified the model drafter's draft; num_accepted is below 0 for the others.
void observe_model(ModelPredictor& predictor, Ints slots, const Input<std::int32_t, 2>& token_ids, Ints lengths,
                   Ints num_accepted, Ints num_nodes, Ints num_steps, std::span<const float> predicted) {
    const std::size_t num = slots.size();
    const CommittedTokens committed(token_ids, lengths, num);
    require(num_accepted.size() == num && num_nodes.size() == num && num_steps.size() == num &&
                predicted.size() == num,
            "num_accepted, num_nodes, num_steps and predicted need one entry per request");
    for (std::size_t i = 0; i < num; ++i) {
        if (num_accepted[i] < 0) continue;
        require_started(predictor, slots[i]);
        require(num_nodes[i] > 0, "a verified draft needs at least one node");
    }
    for (std::size_t i = 0; i < num; ++i) {
        if (num_accepted[i] >= 0)
            predictor.observe(slots[i], committed.of(i),
                              {num_accepted[i], num_nodes[i], num_steps[i], predicted[i]});
    }
}

void predict_model_batch(ModelPredictor& predictor, Ints slots, nb::handle batch,
                         const MaybeAcceptance& cache_acceptance, std::span<float> out) {
    require(out.size() >= slots.size(), "results need one row per request");
    predict_model(predictor, slots, drafts_of(batch, slots.size()), acceptance_of(cache_acceptance, slots.size()),
                  out.data());
}

void predict_model_sizes_batch(ModelPredictor& predictor, Ints slots, nb::handle batch,
                               const MaybeAcceptance& cache_acceptance, Ints sizes, std::span<const double> odds,
                               const Output<float, 3>& acceptance, const Output<float, 3>& if_cache_right) {
    const std::size_t num = slots.size(), num_steps = acceptance.shape(2);
    require(odds.size() == sizes.size(), "odds need one entry per size");
    for (const auto* out : {&acceptance, &if_cache_right})
        require(out->shape(0) >= num && out->shape(1) == sizes.size() && out->shape(2) == num_steps,
                "results need one entry per request, size and step");
    predict_model_sizes(predictor, slots, drafts_of(batch, num), acceptance_of(cache_acceptance, num), sizes, odds,
                        static_cast<int>(num_steps),
                        {acceptance.data(), if_cache_right.data(), sizes.size() * num_steps, num_steps});
}

}  // namespace

void bind_payoff(nb::module_& m) {
    m.attr("NUM_DRAFT_FEATURES") = kNumDraftFeatures;
    m.attr("NUM_POSITION_FEATURES") = kNumPositionFeatures;
    m.attr("NUM_BUCKETS") = kNumBuckets;
    m.attr("MAX_DEPTH") = kMaxDepth;
    m.def("bucket_of", &bucket_of);
    m.def("widest_lanes", &widest_lanes);
    m.def("use_lanes", &use_lanes);
    nb::class_<Tracker>(m, "Tracker", "tracker.py documents it.")
        .def(nb::init<int, std::span<const std::uint8_t>>())
        .def("start", &Tracker::start)
        .def("forget", &Tracker::forget)
        .def("finish", &Tracker::finish)
        .def("extend", &Tracker::extend)
        .def("commit", &commit)
        .def("write", &write_features);
    nb::class_<Network>(m, "Network", "predictor.py documents it.")
        .def(nb::new_(&network_of))
        .def("predict_acceptance", &predict_of_kind_survival)
        .def("predict_len", &predict_of_kind_mlp);
    nb::class_<Calibration>(m, "Calibration", "calibration.py documents it.")
        .def("__init__", [](Calibration* self, int depth) {
            require(depth >= 1 && depth <= kMaxDepth, "depth must be from 1 to 64");
            new (self) Calibration(depth);
        })
        .def("corrects", &Calibration::corrects)
        .def("correct", &correct_batch)
        .def("observe", &observe_cache)
        .def("are_fallback", [](const Calibration& calibration) {
            std::vector<bool> are;
            for (int origin = 0; origin < kNumOrigins; ++origin)
                are.push_back(calibration.of(origin).is_fallback());
            return are;
        })
        .def("figures", [](const Calibration& calibration, int origin) {
            require(origin >= 0 && origin < kNumOrigins, "unknown origin");
            const OriginCalibration& of = calibration.of(origin);
            std::vector<std::tuple<double, double, double>> bins;
            for (const RunningReliability& bin : of.bins()) bins.push_back(sums_of(bin));
            return std::tuple(of.num_verified(), of.shift(), of.is_fallback(), sums_of(of.verified()),
                              sums_of(of.first_tokens()), bins);
        });
    nb::class_<ModelPredictor>(m, "ModelPredictor", "model_predictor.py documents it.")
        .def(nb::init<int, int, double>())
        .def("odds_of", &ModelPredictor::odds_of)
        .def("start", &ModelPredictor::start)
        .def("predict", &predict_model_batch)
        .def("predict_sizes", &predict_model_sizes_batch)
        .def("observe", &observe_model)
        .def("figures", [](const ModelPredictor& predictor) {
            return std::tuple(predictor.num_verified(), sums_of(predictor.reliability()));
        })
        .def("probs", [](const ModelPredictor& predictor) {
            const TokenProbs p = predictor.probs();
            return std::tuple(p[kCacheRight], p[kCacheWrong], p[kAfterCache], p[kWithoutCache]);
        });
}

}  // namespace sglang_hvd
