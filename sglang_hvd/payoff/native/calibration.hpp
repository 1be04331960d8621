// Corrects the predictions for cache drafts while serving, and switches to the fallback where a predictor
// is too far off. calibration.py says why.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "draft_layout.hpp"
#include "request_track.hpp"

namespace sglang_hvd {

// Sums over events, exponentially forgotten: what was predicted, and what was observed.
struct RunningReliability {
    // Factor applied to each sum per event: the figures cover roughly the last thousand events.
    static constexpr double kKept = 0.999;

    double weight = 0, predicted = 0, observed = 0;

    void observe(double what_was_predicted, double what_was_observed) {
        weight = weight * kKept + 1;
        predicted = predicted * kKept + what_was_predicted;
        observed = observed * kKept + what_was_observed;
    }

    // Sum of the events' squared weights. Times the variance of one event it is the variance of `observed`.
    double squared_weight() const {
        const double left = 1 - weight * (1 - kKept);  // weight that the first event still has
        return (1 - left * left) / (1 - kKept * kKept);
    }
};

// The entry of a slot; it is created if the slot is new.
template <typename T>
T& at_slot(std::vector<T>& by_slot, int slot) {
    if (slot < 0) throw std::invalid_argument("slots must not be negative, got " + std::to_string(slot));
    const auto place = static_cast<std::size_t>(slot);
    if (place >= by_slot.size()) by_slot.resize(std::max(place + 1, 2 * by_slot.size()));
    return by_slot[place];
}

// What is predicted for a cache draft. The two probabilities are NaN if the predictor gives bare lengths.
struct CachePrediction {
    std::int32_t draft_len = 0;  // 0: nothing is predicted
    std::int32_t origin = 0;
    std::int32_t first_id = 0;
    double accepted_len = 0;
    double first_prob = std::numeric_limits<double>::quiet_NaN();      // the first token is accepted
    double threshold_prob = std::numeric_limits<double>::quiet_NaN();  // as many as the threshold are
};

// Each probability p becomes sigmoid(logit(p) + ln(factor)), computed without logarithms: 0 and 1 do not
// change. Returns by how much the sum of the probabilities grew.
inline double correct(double factor, int num_tokens, float* acceptance) {
    double added = 0;
    for (int j = 0; j < num_tokens; ++j) {
        const double before = acceptance[j];
        const double after = std::min(before * factor / (1 + before * (factor - 1)), 1.0);
        added += after - before;
        acceptance[j] = static_cast<float>(after);
    }
    return added;
}

constexpr int kNumBins = 10;

// Bound of the correction, in log odds. A predictor that is further off has to be retrained.
constexpr double kMaxShift = 1.0;

// The first num_tokens tokens of a cache draft were verified.
struct VerifiedCacheDraft {
    int num_accepted;
    int num_tokens;
    double predicted;  // accepted tokens
};

// The fallback of an origin was switched on or off, because of these means in tokens.
struct FallbackChange {
    int origin;
    bool is_fallback;
    double mean_predicted, mean_accepted;
};

// The calibration of the drafts of one origin.
class OriginCalibration {
public:
    double shift() const { return shift_; }
    bool is_fallback() const { return is_fallback_; }
    std::int64_t num_verified() const { return num_verified_; }
    const RunningReliability& verified() const { return verified_; }
    const RunningReliability& first_tokens() const { return first_tokens_; }
    const std::array<RunningReliability, kNumBins>& bins() const { return bins_; }

    void observe_first_token(const CachePrediction& prediction, bool is_right, bool is_verified) {
        num_in_fallback_ += is_fallback_;
        if (is_on_trial_ && !is_fallback_ && ++num_on_trial_ > kMaxTrialDrafts) end_trial();
        if (std::isnan(prediction.first_prob)) return;
        first_tokens_.observe(prediction.first_prob, is_right);
        if (is_verified) return;
        const double change = prediction.first_prob * (1 - prediction.first_prob);
        update_shift(is_right - prediction.first_prob, change, kFirstTokenScatter * change);
    }

    // depth: tokens of the threshold.
    void observe_verified(const CachePrediction& prediction, const VerifiedCacheDraft& draft, int depth) {
        const int num_accepted = std::min(draft.num_accepted, kMaxDepth);
        ++num_verified_;
        verified_.observe(draft.predicted, num_accepted);
        if (std::isnan(prediction.threshold_prob)) return;
        // If fewer tokens than the threshold were verified, nobody knows whether the draft reaches it.
        if (draft.num_tokens >= std::min(depth, prediction.draft_len)) {
            const int number = std::min(static_cast<int>(prediction.threshold_prob * kNumBins), kNumBins - 1);
            bins_[static_cast<std::size_t>(number)].observe(prediction.threshold_prob, num_accepted >= depth);
        }
        // The variance of a geometric distribution with this mean, reduced where the draft's end limits it.
        const double mean = draft.predicted;
        const int num_tokens = std::min(draft.num_tokens, kMaxDepth);
        const double scatter = mean * (1 + mean) * std::max(1 - mean / num_tokens, 0.0);
        update_shift(num_accepted - mean, scatter / (1 + 2 * mean), kScatter * scatter + kMinScatter);
    }

    // Call after each observed draft.
    std::optional<FallbackChange> change_fallback(int origin, bool is_verified) {
        if (num_in_fallback_ >= trial_after_) {
            is_on_trial_ = true;
            num_on_trial_ = 0;
            return switch_fallback(origin);
        }
        if (!is_verified || verified_.weight < (is_fallback_ ? kReturnWeight : kFallbackWeight))
            return std::nullopt;
        num_in_fallback_ = 0;
        const double ratio = is_fallback_ ? kReturnRatio : kFallbackRatio;
        const bool is_right = verified_.predicted <= ratio * verified_.observed &&
                              verified_.observed <= ratio * verified_.predicted;
        if (is_right) end_trial();
        if (is_right != is_fallback_ || (!is_fallback_ && !is_beyond_chance())) return std::nullopt;
        // After a failed trial the next one waits twice as long.
        if (is_on_trial_) trial_after_ = std::min(2 * trial_after_, kMaxTrialAfter);
        is_on_trial_ = false;
        return switch_fallback(origin);
    }

private:
    // A Kalman filter follows the shift. Both numbers are variances in log odds: how far off a predictor
    // may be before anything was observed, and how much that may change from one draft to the next.
    static constexpr double kFirstVariance = 0.25, kDrift = 5e-6;
    // Accepted lengths vary more than the geometric distribution that the filter assumes. First tokens of
    // drafts that were not verified are many, and say little about how much of a good draft is accepted.
    static constexpr double kScatter = 3.0, kMinScatter = 0.5, kFirstTokenScatter = 10.0;

    // Accepted over predicted tokens, or the inverse. The fallback starts at the first ratio if the
    // difference is also beyond chance (in standard deviations), and ends below the second. The weights
    // count verified drafts.
    static constexpr double kFallbackRatio = 2.0, kFallbackWeight = 100.0, kFallbackDeviations = 3.0;
    static constexpr double kReturnRatio = 1.5, kReturnWeight = 400.0;

    // In fallback too few drafts may be verified to judge the predictor. After this many observed drafts
    // the predictor decides again, on trial.
    static constexpr int kTrialAfter = 10'000, kMaxTrialAfter = 1024 * kTrialAfter;
    // A predictor on trial has passed if it was not found wrong within this many observed drafts.
    static constexpr int kMaxTrialDrafts = 10 * kTrialAfter;

    // Whether observed and predicted tokens of verified drafts differ by more than chance explains.
    bool is_beyond_chance() const {
        const double mean = verified_.predicted / verified_.weight;
        const double variance = verified_.squared_weight() * (kScatter * mean * (1 + mean) + kMinScatter);
        return std::abs(verified_.observed - verified_.predicted) > kFallbackDeviations * std::sqrt(variance);
    }

    // The predictor decides and was not found wrong, so the wait before the next trial starts at its minimum.
    void end_trial() {
        is_on_trial_ = false;
        trial_after_ = kTrialAfter;
    }

    FallbackChange switch_fallback(int origin) {
        is_fallback_ = !is_fallback_;
        num_in_fallback_ = 0;
        const double weight = std::max(verified_.weight, 1.0);
        const FallbackChange change{origin, is_fallback_, verified_.predicted / weight, verified_.observed / weight};
        // Another rule chooses the drafts from now on, and the figures are to cover only those.
        verified_ = {};
        return change;
    }

    // One step of the Kalman filter. error: observed minus predicted. change: derivative of the prediction
    // with respect to the shift. scatter: variance of the observation.
    void update_shift(double error, double change, double scatter) {
        variance_ += kDrift;
        const double spread = change * change * variance_ + scatter;
        if (spread <= 0) return;  // the outcome was certain
        const double gain = variance_ * change / spread;
        variance_ *= 1 - gain * change;
        shift_ = std::clamp(shift_ + gain * error, -kMaxShift, kMaxShift);
    }

    std::int64_t num_verified_ = 0;
    int num_in_fallback_ = 0;  // drafts observed since the fallback began or was last judged
    int trial_after_ = kTrialAfter;
    int num_on_trial_ = 0;      // drafts observed since the last trial began
    bool is_on_trial_ = false;  // decides again, and is not yet found right or wrong
    double shift_ = 0, variance_ = kFirstVariance;
    bool is_fallback_ = false;
    RunningReliability verified_, first_tokens_;
    std::array<RunningReliability, kNumBins> bins_{};
};

class Calibration {
public:
    // depth: tokens of the threshold.
    explicit Calibration(int depth) : depth_(depth) {}

    const OriginCalibration& of(int origin) const { return origins_[static_cast<std::size_t>(origin)]; }

    bool corrects() const {
        return std::any_of(origins_.begin(), origins_.end(), [](const auto& o) { return o.shift() != 0; });
    }

    // By origin, the factor that the odds of its drafts are multiplied by.
    std::array<double, kNumOrigins> factors() const {
        std::array<double, kNumOrigins> factors;
        for (std::size_t o = 0; o < factors.size(); ++o) factors[o] = std::exp(origins_[o].shift());
        return factors;
    }

    // Corrects a prediction in place by the factor of its origin, and keeps it until the cycle is observed.
    // acceptance: float[kMaxDepth], null if the predictor gives bare lengths.
    void correct_prediction(int slot, CachePrediction prediction, double factor, float& accepted_len,
                            float* acceptance) {
        if (prediction.draft_len > 0) {
            if (acceptance != nullptr) {
                if (factor != 1)  // a factor of 1 must not change any bit
                    accepted_len = static_cast<float>(accepted_len + correct(factor, kMaxDepth, acceptance));
                prediction.first_prob = acceptance[0];
                prediction.threshold_prob = acceptance[depth_ - 1];
            }
            prediction.accepted_len = accepted_len;
        }
        at_slot(by_slot_, slot) = prediction;
    }

    // Learns from a cycle's committed tokens; nothing is learned if there are none. verified: of the cache
    // draft, if any of it was. If its prediction is NaN, the whole draft counts.
    std::optional<FallbackChange> observe(int slot, std::span<const std::int32_t> committed,
                                          std::optional<VerifiedCacheDraft> verified) {
        const CachePrediction prediction = pop(slot);
        if (prediction.draft_len == 0 || committed.empty()) return std::nullopt;
        OriginCalibration& of_origin = origins_[static_cast<std::size_t>(prediction.origin)];
        of_origin.observe_first_token(prediction, committed[0] == prediction.first_id, verified.has_value());
        if (verified) {
            if (std::isnan(verified->predicted)) {
                verified->predicted = prediction.accepted_len;
                verified->num_tokens = prediction.draft_len;
            }
            of_origin.observe_verified(prediction, *verified, depth_);
        }
        return of_origin.change_fallback(prediction.origin, verified.has_value());
    }

private:
    // Each prediction is observed once.
    CachePrediction pop(int slot) {
        const auto place = static_cast<std::size_t>(slot);
        CachePrediction prediction;
        if (place < by_slot_.size()) std::swap(prediction, by_slot_[place]);
        return prediction;
    }

    int depth_;
    std::array<OriginCalibration, kNumOrigins> origins_{};
    std::vector<CachePrediction> by_slot_;
};

}  // namespace sglang_hvd
