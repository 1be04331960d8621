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
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bound_arrays.hpp"
#include "calibration.hpp"
#include "features.hpp"
#include "model_predictor.hpp"
#include "network.hpp"
#include "request_track.hpp"
#include "token_flags.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sglang_hvd {
namespace {

// The committed tokens of a step: the first lengths[i] tokens of row i belong to request i.
class CommittedTokens {
public:
    CommittedTokens(const Input<std::int32_t, 2>& tokens, const Input<std::int32_t, 1>& lengths,
                    std::size_t num)
        : tokens_(tokens.data()), lengths_(lengths.data()), width_(tokens.shape(1)) {
        require(tokens.shape(0) == num && lengths.size() == num,
                "committed tokens need one row and one length per request");
        for (std::size_t i = 0; i < num; ++i)
            require(lengths_[i] >= 0 && static_cast<std::size_t>(lengths_[i]) <= width_,
                    "a length is negative or exceeds its row of tokens");
    }

    std::span<const std::int32_t> of(std::size_t row) const {
        return {tokens_ + row * width_, static_cast<std::size_t>(lengths_[row])};
    }

private:
    const std::int32_t *tokens_, *lengths_;
    std::size_t width_;
};

// The tracks of the active requests. Computes the features of their drafts.
class Tracker {
public:
    Tracker(int window, const Input<std::uint8_t, 1>& classes)
        : window_(window), classes_({classes.data(), classes.size()}) {
        require(window >= 1, "the history window must be at least 1");
    }

    Tracker(const Tracker&) = delete;
    Tracker& operator=(const Tracker&) = delete;

    int start(const Input<std::int32_t, 1>& prompt, const std::string& space, bool teaches) {
        auto track = std::make_unique<RequestTrack>(
            window_, std::span(prompt.data(), prompt.size()), classes_, scope_of(space), teaches);
        if (free_.empty()) {
            free_.push_back(static_cast<int>(tracks_.size()));
            tracks_.emplace_back();
        }
        const int slot = free_.back();
        free_.pop_back();
        tracks_[static_cast<std::size_t>(slot)] = std::move(track);
        return slot;
    }

    void finish(int slot) {
        at(slot);
        tracks_[static_cast<std::size_t>(slot)].reset();
        free_.push_back(slot);
    }

    void extend(int slot, const Input<std::int32_t, 1>& tokens) {
        at(slot).extend({tokens.data(), tokens.size()});
    }

    void commit(const Input<std::int32_t, 1>& slots, const Input<std::int32_t, 2>& tokens,
                const Input<std::int32_t, 1>& lengths, const Input<std::int32_t, 1>& verified_lens,
                const Output<std::int32_t, 1>& accepted_lens) {
        const CommittedTokens committed(tokens, lengths, slots.size());
        require(verified_lens.size() == slots.size() && accepted_lens.size() == slots.size(),
                "committed tokens need one verified and one accepted length per request");
        for (std::size_t i = 0; i < slots.size(); ++i) at(slots.data()[i]);
        for (std::size_t i = 0; i < slots.size(); ++i)
            accepted_lens.data()[i] =
                at(slots.data()[i]).commit(committed.of(i), verified_lens.data()[i], outcomes_);
    }

    void forget() { outcomes_.clear(); }

    // The arrays of a DraftBatch.
    struct Batch {
        Input<std::int32_t, 2> token_ids;
        Input<float, 2> probs;
        Input<std::int32_t, 1> num_nodes;
        Input<float, 2> matches;
        Input<float, 2> evidence;
    };

    void write(const Input<std::int32_t, 1>& slots, const Batch& drafts, const Batch& votes,
               const Output<float, 2>& features, const Output<float, 3>& positions) {
        const std::size_t num = slots.size();
        for (const Batch* batch : {&drafts, &votes}) {
            require(batch->token_ids.shape(0) >= num && batch->probs.shape(0) >= num &&
                        batch->num_nodes.size() >= num && batch->matches.shape(0) >= num &&
                        batch->probs.shape(1) == batch->token_ids.shape(1) &&
                        batch->matches.shape(1) == kMatchColumns &&
                        batch->evidence.shape(0) >= num && batch->evidence.shape(1) == kEvidenceColumns,
                    "the arrays of a draft batch do not fit the requests or each other");
            for (std::size_t i = 0; i < num; ++i) {
                require(batch->num_nodes.data()[i] >= 0 &&
                            static_cast<std::size_t>(batch->num_nodes.data()[i]) <= batch->token_ids.shape(1),
                        "a draft is longer than its row");
            }
        }
        require(features.shape(0) >= num && features.shape(1) == kNumDraftFeatures,
                "features need float32[num_requests, num_features]");
        require(positions.shape(0) >= num && positions.shape(1) == kNumPositionFeatures &&
                    positions.shape(2) == kMaxDepth,
                "positions need float32[num_requests, num_position_features, 64]");
        for (std::size_t i = 0; i < num; ++i) at(slots.data()[i]);
        FeatureWriter writer(classes_, outcomes_);
        for (std::size_t i = 0; i < num; ++i) {
            RequestTrack& track = at(slots.data()[i]);
            const DraftRow draft = row_of(drafts, i);
            if (draft.size() == 0) {
                track.expect_draft({}, -1);
                continue;
            }
            const DraftRow second = row_of(votes, i);
            const auto place = place_of(track, second);
            writer.write(track, draft, second, place, features.data() + i * kNumDraftFeatures,
                         positions.data() + i * kMaxDepth * kNumPositionFeatures);
            const auto width = drafts.token_ids.shape(1);
            const auto length = static_cast<std::size_t>(drafts.num_nodes.data()[i]);
            track.expect_draft({drafts.token_ids.data() + i * width, length}, place);
        }
    }

private:
    RequestTrack& at(int slot) {
        const auto place = static_cast<std::size_t>(slot);
        if (slot < 0 || place >= tracks_.size() || !tracks_[place]) {
            throw std::invalid_argument("slot " + std::to_string(slot) + " belongs to no active request");
        }
        return *tracks_[place];
    }

    static DraftRow row_of(const Batch& batch, std::size_t row) {
        const std::size_t width = batch.token_ids.shape(1);
        const auto num = std::min<std::size_t>(static_cast<std::size_t>(batch.num_nodes.data()[row]), kMaxDepth);
        return {{batch.token_ids.data() + row * width, num},
                {batch.probs.data() + row * width, num},
                read_row<Match>(batch.matches.data() + row * kMatchColumns),
                read_row<DraftEvidence>(batch.evidence.data() + row * kEvidenceColumns)};
    }

    // Where the draft's source is in the request's own text; -1 if it is in finished requests.
    static std::int64_t place_of(const RequestTrack& track, const DraftRow& draft) {
        if (draft.size() == 0 || draft.match.is_from(MatchOrigin::kShared)) return -1;
        const auto length = std::int64_t{track.prompt_len()} + track.generated_len();
        return std::max<std::int64_t>(-1, length - 1 - static_cast<std::int64_t>(draft.match.age));
    }

    // FNV-1a, so that all machines agree; mixed, so that similar names differ in all bits.
    static std::uint64_t scope_of(const std::string& space) {
        std::uint64_t h = 0xCBF29CE484222325u;
        for (const char c : space) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
        h = (h ^ h >> 32) * 0xD6E8FEB86659FD93u;
        return h ^ h >> 32;
    }

    int window_;
    TokenOutcomes outcomes_{1 << 18};
    TokenFlags classes_;
    std::vector<std::unique_ptr<RequestTrack>> tracks_;
    std::vector<int> free_;
};

Network network_of(const Input<float, 1>& mean, const Input<float, 1>& std, const nb::list& weights,
                   const nb::list& biases) {
    require(mean.size() == std.size() && nb::len(weights) == nb::len(biases) && nb::len(weights) > 0,
            "a network needs as many means as deviations, and as many biases as weights");
    Network network({mean.data(), mean.size()}, {std.data(), std.size()});
    std::size_t num_in = mean.size();
    for (std::size_t i = 0; i < nb::len(weights); ++i) {
        const auto weight = nb::cast<Input<float, 2>>(weights[i]);
        const auto bias = nb::cast<Input<float, 1>>(biases[i]);
        require(weight.shape(1) == num_in && weight.shape(0) == bias.size() && bias.size() > 0,
                "a layer's weights do not fit the layer before or its biases");
        network.add_layer({weight.data(), weight.size()}, {bias.data(), bias.size()});
        num_in = bias.size();
    }
    return network;
}

void predict_acceptance(Network& network, const Input<float, 2>& features,
                      const Input<float, 3>& positions, const Input<std::int32_t, 1>& num_tokens,
                      const Output<float, 1>& accepted_lens, const Output<float, 2>& acceptance) {
    const std::size_t num = num_tokens.size();
    require(features.shape(0) >= num && features.shape(1) >= network.num_in() &&
                network.num_out() == kNumBuckets + kNumPositionFeatures,
            "features do not fit the network");
    require(positions.shape(0) >= num && positions.shape(1) == kNumPositionFeatures &&
                positions.shape(2) == kMaxDepth,
            "positions need float32[num_requests, num_position_features, 64]");
    require(accepted_lens.size() >= num && acceptance.shape(0) >= num && acceptance.shape(1) == kMaxDepth,
            "results need one row per request");
    const float* outputs = network.run(features.data(), num, features.shape(1));
    for (std::size_t i = 0; i < num; ++i) {
        float* row = acceptance.data() + i * kMaxDepth;
        std::fill_n(row, kMaxDepth, 0.f);
        accepted_lens.data()[i] =
            write_acceptance(outputs + i * network.num_padded_out(),
                        positions.data() + i * kMaxDepth * kNumPositionFeatures, num_tokens.data()[i], row);
    }
}

void predict_len(Network& network, const Input<float, 2>& features, const Output<float, 1>& accepted_lens) {
    const std::size_t num = accepted_lens.size();
    require(features.shape(0) >= num && features.shape(1) >= network.num_in() && network.num_out() == 1,
            "features do not fit the network");
    const float* outputs = network.run(features.data(), num, features.shape(1));
    for (std::size_t i = 0; i < num; ++i) {
        const float length = outputs[i * network.num_padded_out()];
        accepted_lens.data()[i] = std::isfinite(length) ? length : 0;
    }
}

using Acceptance = std::optional<Output<float, 2>>;

void require_drafts(std::size_t num, const Input<std::int32_t, 2>& token_ids,
                    const Input<std::int32_t, 1>& num_nodes, const Acceptance& acceptance) {
    require(token_ids.shape(0) >= num && token_ids.shape(1) > 0 && num_nodes.size() >= num,
            "the arrays of a draft batch do not fit the requests");
    require(!acceptance || (acceptance->shape(0) >= num && acceptance->shape(1) == kMaxDepth),
            "acceptance needs float32[num_requests, 64]");
}

// Corrects predictions in place, and keeps them by slot until the cycles are observed.
void correct_batch(Calibration& calibration, const Input<std::int32_t, 1>& slots,
                   const Input<std::int32_t, 2>& token_ids, const Input<std::int32_t, 1>& num_nodes,
                   const Input<float, 2>& matches, const Output<float, 1>& accepted_lens,
                   const Acceptance& acceptance) {
    const std::size_t num = slots.size();
    require_drafts(num, token_ids, num_nodes, acceptance);
    require(matches.shape(0) >= num && matches.shape(1) == kMatchColumns && accepted_lens.size() >= num,
            "matches or accepted_lens do not fit the requests");
    const auto factors = calibration.factors();
    for (std::size_t i = 0; i < num; ++i) {
        const int slot = slots.data()[i];
        const float origin = matches.data()[i * kMatchColumns + kOriginColumn];
        const bool has_draft = num_nodes.data()[i] > 0;
        require(slot >= 0, "slots must not be negative");
        require(!has_draft || (origin >= 0 && origin < kNumOrigins), "unknown origin of a match");
        CachePrediction prediction;
        if (has_draft) {
            prediction.draft_len = num_nodes.data()[i];
            prediction.origin = static_cast<std::int32_t>(origin);
            prediction.first_id = token_ids.data()[i * token_ids.shape(1)];
        }
        float* row = acceptance ? acceptance->data() + i * kMaxDepth : nullptr;
        calibration.correct_prediction(slot, prediction, factors[static_cast<std::size_t>(prediction.origin)],
                                       accepted_lens.data()[i], row);
    }
}

// Returns the fallbacks that changed: origin, whether it is on, mean predicted and mean accepted tokens.
std::vector<std::tuple<int, bool, double, double>> observe_cache(
    Calibration& calibration, const Input<std::int32_t, 1>& slots,
    const Input<std::int32_t, 2>& token_ids, const Input<std::int32_t, 1>& lengths,
    const Input<std::int32_t, 1>& accepted_lens, const Input<std::int32_t, 1>& verified_lens,
    const Input<float, 1>& predicted) {
    const std::size_t num = slots.size();
    const CommittedTokens committed(token_ids, lengths, num);
    require(accepted_lens.size() == num && verified_lens.size() == num && predicted.size() == num,
            "accepted_lens, verified_lens and predicted need one entry per request");
    std::vector<std::tuple<int, bool, double, double>> changes;
    for (std::size_t i = 0; i < num; ++i) {
        std::optional<VerifiedCacheDraft> verified;
        if (verified_lens.data()[i] > 0)
            verified = {accepted_lens.data()[i], verified_lens.data()[i], predicted.data()[i]};
        if (const auto change = calibration.observe(slots.data()[i], committed.of(i), verified))
            changes.emplace_back(change->origin, change->is_fallback, change->mean_predicted,
                                 change->mean_accepted);
    }
    return changes;
}

std::tuple<double, double, double> sums_of(const RunningReliability& sums) {
    return {sums.weight, sums.predicted, sums.observed};
}

// Learns from the cycles that verified the model drafter's draft; num_accepted is below 0 for the others.
void observe_model(ModelPredictor& predictor, const Input<std::int32_t, 1>& slots,
                   const Input<std::int32_t, 2>& token_ids, const Input<std::int32_t, 1>& lengths,
                   const Input<std::int32_t, 1>& num_accepted, const Input<std::int32_t, 1>& num_nodes,
                   const Input<std::int32_t, 1>& num_steps, const Input<float, 1>& predicted) {
    const std::size_t num = slots.size();
    const CommittedTokens committed(token_ids, lengths, num);
    require(num_accepted.size() == num && num_nodes.size() == num && num_steps.size() == num &&
                predicted.size() == num,
            "num_accepted, num_nodes, num_steps and predicted need one entry per request");
    for (std::size_t i = 0; i < num; ++i) {
        if (num_accepted.data()[i] < 0) continue;
        require(predictor.has(slots.data()[i]), "a slot was not started");
        require(num_nodes.data()[i] > 0, "a verified draft needs at least one node");
    }
    for (std::size_t i = 0; i < num; ++i) {
        if (num_accepted.data()[i] < 0) continue;
        predictor.observe(slots.data()[i], committed.of(i),
                          {num_accepted.data()[i], num_nodes.data()[i], num_steps.data()[i],
                           predicted.data()[i]});
    }
}

void predict_model(ModelPredictor& predictor, const Input<std::int32_t, 1>& slots,
                   const Input<std::int32_t, 2>& token_ids, const Input<std::int32_t, 1>& num_nodes,
                   const Acceptance& cache_acceptance, const Output<float, 1>& out) {
    const std::size_t num = slots.size(), width = token_ids.shape(1);
    require_drafts(num, token_ids, num_nodes, cache_acceptance);
    require(out.size() >= num, "results need one row per request");
    const TokenProbs probs = predictor.probs();
    for (std::size_t i = 0; i < num; ++i) {
        const int slot = slots.data()[i];
        const auto draft_len = num_nodes.data()[i];
        require(predictor.has(slot), "a slot was not started");
        require(draft_len >= 0 && static_cast<std::size_t>(draft_len) <= width,
                "a draft is longer than its row");
        const std::span draft(token_ids.data() + i * width, static_cast<std::size_t>(draft_len));
        const float* row = cache_acceptance ? cache_acceptance->data() + i * kMaxDepth : nullptr;
        out.data()[i] = predictor.predict(slot, draft, probs, row);
    }
}

void predict_model_sizes(ModelPredictor& predictor, const Input<std::int32_t, 1>& slots,
                         const Input<std::int32_t, 1>& num_nodes, const Acceptance& cache_acceptance,
                         const Input<std::int32_t, 1>& sizes, const Input<double, 1>& odds,
                         const Output<float, 3>& acceptance, const Output<float, 3>& if_cache_right) {
    const std::size_t num = slots.size(), num_sizes = sizes.size(), num_steps = acceptance.shape(2);
    require(num_nodes.size() >= num && odds.size() == num_sizes,
            "num_nodes needs one entry per request, odds one per size");
    require(!cache_acceptance || (cache_acceptance->shape(0) >= num && cache_acceptance->shape(1) == kMaxDepth),
            "cache_acceptance needs float32[num_requests, 64]");
    for (const auto* out : {&acceptance, &if_cache_right})
        require(out->shape(0) >= num && out->shape(1) == num_sizes && out->shape(2) == num_steps,
                "results need one entry per request, size and step");
    const TokenProbs probs = predictor.probs();
    for (std::size_t i = 0; i < num; ++i) {
        const int slot = slots.data()[i];
        require(predictor.has(slot), "a slot was not started");
        const float* row = cache_acceptance ? cache_acceptance->data() + i * kMaxDepth : nullptr;
        for (std::size_t size = 0; size < num_sizes; ++size) {
            const std::size_t first = (i * num_sizes + size) * num_steps;
            write_model_acceptance(probs, static_cast<int>(num_steps), num_nodes.data()[i], row,
                                   predictor.at(slot).ratio, {sizes.data()[size], odds.data()[size]},
                                   acceptance.data() + first, if_cache_right.data() + first);
        }
    }
}

}  // namespace
}  // namespace sglang_hvd

NB_MODULE(_native, m) {
    using namespace sglang_hvd;
    nb::set_leak_warnings(false);  // objects that remain when the interpreter ends are no leaks
    m.attr("NUM_DRAFT_FEATURES") = kNumDraftFeatures;
    m.attr("NUM_POSITION_FEATURES") = kNumPositionFeatures;
    m.attr("NUM_BUCKETS") = kNumBuckets;
    m.attr("MAX_DEPTH") = kMaxDepth;
    m.def("bucket_of", &bucket_of, "position"_a);
    m.def("widest_lanes", &widest_lanes);
    m.def("use_lanes", &use_lanes, "lanes"_a);
    nb::class_<Tracker>(m, "Tracker", "tracker.py documents it.")
        .def(nb::init<int, const Input<std::uint8_t, 1>&>(), "window"_a, "classes"_a.noconvert())
        .def("start", &Tracker::start, "prompt_ids"_a.noconvert(), "namespace"_a, "teaches"_a)
        .def("forget", &Tracker::forget)
        .def("finish", &Tracker::finish, "slot"_a)
        .def("extend", &Tracker::extend, "slot"_a, "token_ids"_a.noconvert())
        .def("commit", &Tracker::commit, "slots"_a.noconvert(), "token_ids"_a.noconvert(),
             "lengths"_a.noconvert(), "verified_lens"_a.noconvert(), "accepted_lens"_a.noconvert())
        .def(
            "write",
            [](Tracker& tracker, const Input<std::int32_t, 1>& slots,
               const Input<std::int32_t, 2>& token_ids, const Input<float, 2>& probs,
               const Input<std::int32_t, 1>& num_nodes, const Input<float, 2>& matches,
               const Input<float, 2>& evidence, const Input<std::int32_t, 2>& votes_token_ids,
               const Input<float, 2>& votes_probs, const Input<std::int32_t, 1>& votes_num_nodes,
               const Input<float, 2>& votes_matches, const Input<float, 2>& votes_evidence,
               const Output<float, 2>& features, const Output<float, 3>& positions) {
                tracker.write(slots, {token_ids, probs, num_nodes, matches, evidence},
                              {votes_token_ids, votes_probs, votes_num_nodes, votes_matches,
                               votes_evidence},
                              features, positions);
            },
            "slots"_a.noconvert(), "token_ids"_a.noconvert(), "probs"_a.noconvert(),
            "num_nodes"_a.noconvert(), "matches"_a.noconvert(), "evidence"_a.noconvert(),
            "votes_token_ids"_a.noconvert(), "votes_probs"_a.noconvert(),
            "votes_num_nodes"_a.noconvert(), "votes_matches"_a.noconvert(),
            "votes_evidence"_a.noconvert(), "features"_a.noconvert(), "positions"_a.noconvert());
    nb::class_<Network>(m, "Network", "predictor.py documents it.")
        .def(
            "__init__",
            [](Network* self, const Input<float, 1>& mean, const Input<float, 1>& std,
               const nb::list& weights, const nb::list& biases) {
                new (self) Network(network_of(mean, std, weights, biases));
            },
            "mean"_a.noconvert(), "std"_a.noconvert(), "weights"_a, "biases"_a)
        .def("predict_acceptance", &predict_acceptance, "features"_a.noconvert(),
             "positions"_a.noconvert(), "num_tokens"_a.noconvert(), "accepted_lens"_a.noconvert(),
             "acceptance"_a.noconvert())
        .def("predict_len", &predict_len, "features"_a.noconvert(), "accepted_lens"_a.noconvert());
    nb::class_<Calibration>(m, "Calibration", "calibration.py documents it.")
        .def("__init__", [](Calibration* self, int depth) {
            require(depth >= 1 && depth <= kMaxDepth, "depth must be from 1 to 64");
            new (self) Calibration(depth);
        }, "depth"_a)
        .def("corrects", &Calibration::corrects)
        .def("correct", &correct_batch, "slots"_a.noconvert(), "token_ids"_a.noconvert(),
             "num_nodes"_a.noconvert(), "matches"_a.noconvert(), "accepted_lens"_a.noconvert(),
             "acceptance"_a.noconvert().none())
        .def("observe", &observe_cache, "slots"_a.noconvert(), "token_ids"_a.noconvert(),
             "lengths"_a.noconvert(), "accepted_lens"_a.noconvert(), "verified_lens"_a.noconvert(),
             "predicted"_a.noconvert())
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
        }, "origin"_a);
    nb::class_<ModelPredictor>(m, "ModelPredictor", "model_predictor.py documents it.")
        .def(nb::init<int, int, double>(), "num_steps"_a, "full_size"_a, "size_effect"_a)
        .def("odds_of", &ModelPredictor::odds_of, "num_nodes"_a)
        .def("start", &ModelPredictor::start, "slot"_a)
        .def("predict", &predict_model, "slots"_a.noconvert(), "token_ids"_a.noconvert(),
             "num_nodes"_a.noconvert(), "cache_acceptance"_a.noconvert().none(), "out"_a.noconvert())
        .def("predict_sizes", &predict_model_sizes, "slots"_a.noconvert(), "num_nodes"_a.noconvert(),
             "cache_acceptance"_a.noconvert().none(), "sizes"_a.noconvert(), "odds"_a.noconvert(),
             "acceptance"_a.noconvert(), "if_cache_right"_a.noconvert())
        .def("observe", &observe_model, "slots"_a.noconvert(), "token_ids"_a.noconvert(),
             "lengths"_a.noconvert(), "num_accepted"_a.noconvert(), "num_nodes"_a.noconvert(),
             "num_steps"_a.noconvert(), "predicted"_a.noconvert())
        .def("figures", [](const ModelPredictor& predictor) {
            return std::tuple(predictor.num_verified(), sums_of(predictor.reliability()));
        })
        .def("probs", [](const ModelPredictor& predictor) {
            const TokenProbs p = predictor.probs();
            return std::tuple(p[kCacheRight], p[kCacheWrong], p[kAfterCache], p[kWithoutCache]);
        });
}
