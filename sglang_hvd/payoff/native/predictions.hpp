// The predictions for all drafts of a batch. Row i belongs to slots[i]. The acceptance of cache drafts is
// [requests][kMaxDepth], null with a predictor of bare lengths.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "calibration.hpp"
#include "draft_layout.hpp"
#include "model_predictor.hpp"
#include "network.hpp"

namespace sglang_hvd {

// By a network of kind survival. features: [requests][stride]. positions: as Tracker::write has them.
inline void predict_acceptance(Network& network, const float* features, std::size_t stride, const float* positions,
                               std::span<const std::int32_t> num_tokens, float* accepted_lens, float* acceptance) {
    const std::size_t num = num_tokens.size();
    const float* outputs = network.run(features, num, stride);
    for (std::size_t i = 0; i < num; ++i) {
        float* row = acceptance + i * kMaxDepth;
        std::fill_n(row, kMaxDepth, 0.f);
        accepted_lens[i] = write_acceptance(outputs + i * network.num_padded_out(),
                                            positions + i * kNumPositionFeatures * kMaxDepth, num_tokens[i], row);
    }
}

// By a network of kind mlp.
inline void predict_lens(Network& network, const float* features, std::size_t stride,
                         std::span<float> accepted_lens) {
    const float* outputs = network.run(features, accepted_lens.size(), stride);
    for (std::size_t i = 0; i < accepted_lens.size(); ++i) {
        const float length = outputs[i * network.num_padded_out()];
        accepted_lens[i] = std::isfinite(length) ? length : 0;
    }
}

// Corrects the predictions in place, and keeps them by slot until the cycles are observed.
inline void correct_all(Calibration& calibration, std::span<const std::int32_t> slots, const DraftRows& drafts,
                        float* accepted_lens, float* acceptance) {
    const auto factors = calibration.factors();
    for (std::size_t i = 0; i < slots.size(); ++i) {
        CachePrediction prediction;
        if (drafts.length(i) > 0) {
            const float origin = drafts.match(i).origin;
            if (!(origin >= 0 && origin < kNumOrigins)) throw std::invalid_argument("unknown origin of a match");
            prediction.draft_len = drafts.num_nodes[i];
            prediction.origin = static_cast<std::int32_t>(origin);
            prediction.first_id = drafts.tokens(i).front();
        }
        calibration.correct_prediction(slots[i], prediction, factors[static_cast<std::size_t>(prediction.origin)],
                                       accepted_lens[i],
                                       acceptance == nullptr ? nullptr : acceptance + i * kMaxDepth);
    }
}

inline void require_started(const ModelPredictor& predictor, int slot) {
    if (!predictor.has(slot)) throw std::invalid_argument("a slot was not started");
}

// Predicted accepted tokens of the model drafter's drafts in the full size.
inline void predict_model(ModelPredictor& predictor, std::span<const std::int32_t> slots, const DraftRows& drafts,
                          const float* acceptance, float* out) {
    const TokenProbs probs = predictor.probs();
    for (std::size_t i = 0; i < slots.size(); ++i) {
        require_started(predictor, slots[i]);
        out[i] = predictor.predict(slots[i], drafts.tokens(i), probs,
                                   acceptance == nullptr ? nullptr : acceptance + i * kMaxDepth);
    }
}

// Where the acceptance of model drafts is written: for each request row_stride values, of which each size has
// size_stride. A predictor has num_steps values of a size.
struct ModelRows {
    float *of_all, *if_cache_right;
    std::size_t row_stride, size_stride;
};

// The acceptance of the model drafter's drafts in each size; see model_predictor.py.
inline void predict_model_sizes(ModelPredictor& predictor, std::span<const std::int32_t> slots,
                                const DraftRows& drafts, const float* acceptance,
                                std::span<const std::int32_t> sizes, std::span<const double> odds, int num_steps,
                                const ModelRows& out) {
    const TokenProbs probs = predictor.probs();
    for (std::size_t i = 0; i < slots.size(); ++i) {
        require_started(predictor, slots[i]);
        for (std::size_t size = 0; size < sizes.size(); ++size) {
            const std::size_t first = i * out.row_stride + size * out.size_stride;
            write_model_acceptance(probs, num_steps, drafts.num_nodes[i],
                                   acceptance == nullptr ? nullptr : acceptance + i * kMaxDepth,
                                   predictor.at(slots[i]).ratio, {sizes[size], odds[size]}, out.of_all + first,
                                   out.if_cache_right + first);
        }
    }
}

}  // namespace sglang_hvd
