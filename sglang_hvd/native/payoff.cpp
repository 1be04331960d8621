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

#include "bindings.hpp"
#include "bound_arrays.hpp"
#include "calibration.hpp"
#include "features.hpp"
#include "model_predictor.hpp"
#include "network.hpp"
#include "request_track.hpp"
#include "token_flags.hpp"

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

// The cache drafts of a DraftBatch, one row per request.
class Drafts {
public:
    Drafts(nb::handle batch, std::size_t num)
        : token_ids_(array_of<const std::int32_t, 2>(batch, "token_ids", num)),
          num_nodes_(array_of<const std::int32_t, 1>(batch, "num_nodes", num)) {
        for (std::size_t i = 0; i < num; ++i)
            require(length(i) >= 0 && static_cast<std::size_t>(length(i)) <= width(),
                    "a draft is longer than its row");
    }

    std::size_t width() const { return token_ids_.shape(1); }
    int length(std::size_t row) const { return num_nodes_.data()[row]; }
    Ints of(std::size_t row) const { return token_ids_.row(row).first(static_cast<std::size_t>(length(row))); }

private:
    Input<std::int32_t, 2> token_ids_;
    Input<std::int32_t, 1> num_nodes_;
};

// The same drafts with all that their features need.
class DescribedDrafts : public Drafts {
public:
    DescribedDrafts(nb::handle batch, std::size_t num)
        : Drafts(batch, num),
          probs_(array_of<const float, 2>(batch, "probs", num, width())),
          matches_(array_of<const float, 2>(batch, "matches", num, kMatchColumns)),
          evidence_(array_of<const float, 2>(batch, "evidence", num, kEvidenceColumns)) {}

    DraftRow row(std::size_t i) const {
        const Ints token_ids = of(i).first(std::min<std::size_t>(of(i).size(), kMaxDepth));
        return {token_ids, probs_.row(i).first(token_ids.size()), read_row<Match>(matches_.row(i).data()),
                read_row<DraftEvidence>(evidence_.row(i).data())};
    }

private:
    Input<float, 2> probs_, matches_, evidence_;
};

void require_positions(const auto& positions, std::size_t num) {
    require(positions.shape(0) >= num && positions.shape(1) == kNumPositionFeatures &&
                positions.shape(2) == kMaxDepth,
            "positions need float32[num_requests, num_position_features, 64]");
}

// The tracks of the active requests. Computes the features of their drafts.
class Tracker {
public:
    Tracker(int window, std::span<const std::uint8_t> classes) : window_(window), classes_(classes) {
        require(window >= 1, "the history window must be at least 1");
    }

    Tracker(const Tracker&) = delete;
    Tracker& operator=(const Tracker&) = delete;

    int start(Ints prompt, const std::string& space, bool teaches) {
        auto track = std::make_unique<RequestTrack>(window_, prompt, classes_, scope_of(space), teaches);
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

    void extend(int slot, Ints tokens) { at(slot).extend(tokens); }

    void commit(Ints slots, const Input<std::int32_t, 2>& tokens, Ints lengths, Ints verified_lens,
                std::span<std::int32_t> accepted_lens) {
        const CommittedTokens committed(tokens, lengths, slots.size());
        require(verified_lens.size() == slots.size() && accepted_lens.size() == slots.size(),
                "committed tokens need one verified and one accepted length per request");
        for (const int slot : slots) at(slot);
        for (std::size_t i = 0; i < slots.size(); ++i)
            accepted_lens[i] = at(slots[i]).commit(committed.of(i), verified_lens[i], outcomes_);
    }

    void forget() { outcomes_.clear(); }

    void write(Ints slots, nb::handle drafts_batch, nb::handle votes_batch, const Output<float, 2>& features,
               const Output<float, 3>& positions) {
        const std::size_t num = slots.size();
        const DescribedDrafts drafts(drafts_batch, num), votes(votes_batch, num);
        require(features.shape(0) >= num && features.shape(1) == kNumDraftFeatures,
                "features need float32[num_requests, num_features]");
        require_positions(positions, num);
        for (const int slot : slots) at(slot);
        FeatureWriter writer(classes_, outcomes_);
        for (std::size_t i = 0; i < num; ++i) {
            RequestTrack& track = at(slots[i]);
            if (drafts.length(i) == 0) {
                track.expect_draft({}, -1);
                continue;
            }
            const DraftRow second = votes.row(i);
            const auto place = place_of(track, second);
            writer.write(track, drafts.row(i), second, place, features.row(i).data(), positions.row(i).data());
            track.expect_draft(drafts.of(i), place);
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

void predict_acceptance(Network& network, const Input<float, 2>& features, const Input<float, 3>& positions,
                        Ints num_tokens, std::span<float> accepted_lens, const Output<float, 2>& acceptance) {
    const std::size_t num = num_tokens.size();
    require(features.shape(0) >= num && features.shape(1) >= network.num_in() &&
                network.num_out() == kNumBuckets + kNumPositionFeatures,
            "features do not fit the network");
    require_positions(positions, num);
    require(accepted_lens.size() >= num && acceptance.shape(0) >= num && acceptance.shape(1) == kMaxDepth,
            "results need one row per request");
    const float* outputs = network.run(features.data(), num, features.shape(1));
    for (std::size_t i = 0; i < num; ++i) {
        float* row = acceptance.row(i).data();
        std::fill_n(row, kMaxDepth, 0.f);
        accepted_lens[i] = write_acceptance(outputs + i * network.num_padded_out(), positions.row(i).data(),
                                            num_tokens[i], row);
    }
}

void predict_len(Network& network, const Input<float, 2>& features, std::span<float> accepted_lens) {
    const std::size_t num = accepted_lens.size();
    require(features.shape(0) >= num && features.shape(1) >= network.num_in() && network.num_out() == 1,
            "features do not fit the network");
    const float* outputs = network.run(features.data(), num, features.shape(1));
    for (std::size_t i = 0; i < num; ++i) {
        const float length = outputs[i * network.num_padded_out()];
        accepted_lens[i] = std::isfinite(length) ? length : 0;
    }
}

// The acceptance of cache drafts, one row per request, or none with a predictor of bare lengths.
template <typename T>
class Acceptance {
public:
    Acceptance(const std::optional<Output<T, 2>>& rows, std::size_t num) : rows_(rows) {
        require(!rows || (rows->shape(0) >= num && rows->shape(1) == kMaxDepth),
                "acceptance needs float32[num_requests, 64]");
    }
    T* row(std::size_t i) const { return rows_ ? rows_->row(i).data() : nullptr; }

private:
    const std::optional<Output<T, 2>>& rows_;
};
using MaybeAcceptance = std::optional<Input<float, 2>>;

// Corrects predictions in place, and keeps them by slot until the cycles are observed.
void correct_batch(Calibration& calibration, Ints slots, nb::handle batch, std::span<float> accepted_lens,
                   const std::optional<Output<float, 2>>& acceptance_rows) {
    const std::size_t num = slots.size();
    const Drafts drafts(batch, num);
    const auto matches = array_of<const float, 2>(batch, "matches", num, kMatchColumns);
    const Acceptance acceptance(acceptance_rows, num);
    require(accepted_lens.size() >= num, "accepted_lens do not fit the requests");
    const auto factors = calibration.factors();
    for (std::size_t i = 0; i < num; ++i) {
        require(slots[i] >= 0, "slots must not be negative");
        CachePrediction prediction;
        if (drafts.length(i) > 0) {
            const float origin = matches.row(i)[kOriginColumn];
            require(origin >= 0 && origin < kNumOrigins, "unknown origin of a match");
            prediction.draft_len = drafts.length(i);
            prediction.origin = static_cast<std::int32_t>(origin);
            prediction.first_id = drafts.of(i).front();
        }
        calibration.correct_prediction(slots[i], prediction, factors[static_cast<std::size_t>(prediction.origin)],
                                       accepted_lens[i], acceptance.row(i));
    }
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

void require_started(const ModelPredictor& predictor, int slot) {
    require(predictor.has(slot), "a slot was not started");
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

void predict_model(ModelPredictor& predictor, Ints slots, nb::handle batch,
                   const MaybeAcceptance& cache_acceptance, std::span<float> out) {
    const std::size_t num = slots.size();
    const Drafts drafts(batch, num);
    const Acceptance acceptance(cache_acceptance, num);
    require(out.size() >= num, "results need one row per request");
    const TokenProbs probs = predictor.probs();
    for (std::size_t i = 0; i < num; ++i) {
        require_started(predictor, slots[i]);
        out[i] = predictor.predict(slots[i], drafts.of(i), probs, acceptance.row(i));
    }
}

void predict_model_sizes(ModelPredictor& predictor, Ints slots, nb::handle batch,
                         const MaybeAcceptance& cache_acceptance, Ints sizes, std::span<const double> odds,
                         const Output<float, 3>& acceptance, const Output<float, 3>& if_cache_right) {
    const std::size_t num = slots.size(), num_sizes = sizes.size(), num_steps = acceptance.shape(2);
    const auto num_nodes = array_of<const std::int32_t, 1>(batch, "num_nodes", num);
    const Acceptance of_cache(cache_acceptance, num);
    require(odds.size() == num_sizes, "odds need one entry per size");
    for (const auto* out : {&acceptance, &if_cache_right})
        require(out->shape(0) >= num && out->shape(1) == num_sizes && out->shape(2) == num_steps,
                "results need one entry per request, size and step");
    const TokenProbs probs = predictor.probs();
    for (std::size_t i = 0; i < num; ++i) {
        require_started(predictor, slots[i]);
        for (std::size_t size = 0; size < num_sizes; ++size) {
            const std::size_t first = size * num_steps;
            write_model_acceptance(probs, static_cast<int>(num_steps), num_nodes.data()[i], of_cache.row(i),
                                   predictor.at(slots[i]).ratio, {sizes[size], odds[size]},
                                   &acceptance.row(i)[first], &if_cache_right.row(i)[first]);
        }
    }
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
        .def("commit", &Tracker::commit)
        .def("write", &Tracker::write);
    nb::class_<Network>(m, "Network", "predictor.py documents it.")
        .def(nb::new_(&network_of))
        .def("predict_acceptance", &predict_acceptance)
        .def("predict_len", &predict_len);
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
        .def("predict", &predict_model)
        .def("predict_sizes", &predict_model_sizes)
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
