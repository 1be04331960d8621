// Keeps a predictor right while it serves: the rules of calibration.py.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "draft_layout.hpp"
#include "expectations.hpp"
#include "reliability.hpp"
#include "request_track.hpp"

namespace sglang_hvd {

constexpr int kNumBins = 10;

// Bound of the correction, in log odds: a predictor that is further off has to be trained again.
constexpr double kMaxShift = 1.0;

// What was verified of a cache draft, its first num_tokens tokens, and what of that was accepted.
struct VerifiedCacheDraft {
    int num_accepted;
    int num_tokens;
    double expected;  // accepted tokens
};

// The fallback of an origin went on or off, because of these means in tokens.
struct FallbackChange {
    int origin;
    bool is_fallback;
    double mean_predicted, mean_accepted;
};

// What is known of the drafts of one origin.
class OriginCalibration {
public:
    double shift() const { return shift_; }
    bool is_fallback() const { return is_fallback_; }
    std::int64_t num_verified() const { return num_verified_; }
    const RunningReliability& verified() const { return verified_; }
    const RunningReliability& first_tokens() const { return first_tokens_; }
    const std::array<RunningReliability, kNumBins>& bins() const { return bins_; }

    void see_first_token(const CacheExpectation& expected, bool is_right, bool is_verified) {
        num_in_fallback_ += is_fallback_;
        if (is_on_trial_ && !is_fallback_ && ++num_on_trial_ > kTrialLasts) end_trial();
        if (std::isnan(expected.first_prob)) return;
        first_tokens_.add(expected.first_prob, is_right);
        if (is_verified) return;
        const double change = expected.first_prob * (1 - expected.first_prob);
        track(is_right - expected.first_prob, change, kFirstTokenScatter * change);
    }

    // depth: tokens of the threshold.
    void see_verified(const CacheExpectation& expected, const VerifiedCacheDraft& draft, int depth) {
        const int num_accepted = std::min(draft.num_accepted, kMaxDepth);
        ++num_verified_;
        verified_.add(draft.expected, num_accepted);
        if (std::isnan(expected.reach_prob)) return;
        // A draft that was cut short of the threshold does not tell whether it would have got there.
        if (draft.num_tokens >= std::min(depth, expected.draft_len)) {
            const int number = std::min(static_cast<int>(expected.reach_prob * kNumBins), kNumBins - 1);
            bins_[static_cast<std::size_t>(number)].add(expected.reach_prob, num_accepted >= depth);
        }
        // The variance of a geometric distribution with this mean, as far as the draft lets it go.
        const double mean = draft.expected;
        const int num_tokens = std::min(draft.num_tokens, kMaxDepth);
        const double scatter = mean * (1 + mean) * std::max(1 - mean / num_tokens, 0.0);
        track(num_accepted - mean, scatter / (1 + 2 * mean), kScatter * scatter + kLeastScatter);
    }

    // After each draft that was seen.
    std::optional<FallbackChange> change_fallback(int origin, bool is_verified) {
        if (num_in_fallback_ >= trial_after_) {
            is_on_trial_ = true;
            num_on_trial_ = 0;
            return turn_fallback(origin);
        }
        if (!is_verified || verified_.weight < (is_fallback_ ? kReturnWeight : kFallbackWeight))
            return std::nullopt;
        num_in_fallback_ = 0;
        const double ratio = is_fallback_ ? kReturnRatio : kFallbackRatio;
        const bool is_right = verified_.predicted <= ratio * verified_.observed &&
                              verified_.observed <= ratio * verified_.predicted;
        if (is_right) end_trial();
        if (is_right != is_fallback_ || (!is_fallback_ && !is_beyond_chance())) return std::nullopt;
        // A trial that failed makes the next one wait twice as long.
        if (is_on_trial_) trial_after_ = std::min(2 * trial_after_, kLastTrialAfter);
        is_on_trial_ = false;
        return turn_fallback(origin);
    }

private:
    // The shift is tracked as a Kalman filter does: what a predictor may be off by before anything was
    // seen, and by how much that may change from one draft to the next, as variances in log odds.
    static constexpr double kFirstVariance = 0.25, kDrift = 5e-6;
    // Accepted lengths scatter more than the geometric distribution that the filter takes them for,
    // and the first tokens of drafts that were not verified, which come in larger numbers, say little
    // of how far a good draft goes.
    static constexpr double kScatter = 3.0, kLeastScatter = 0.5, kFirstTokenScatter = 10.0;

    // Accepted tokens over predicted ones, either way round: the predictor is not heeded from the
    // first on, if chance would hardly bring that (in standard deviations), and heeded again below
    // the second. The weights are of verified drafts.
    static constexpr double kFallbackRatio = 2.0, kFallbackWeight = 100.0, kFallbackDeviations = 3.0;
    static constexpr double kReturnRatio = 1.5, kReturnWeight = 400.0;

    // Drafts seen after which a predictor that is not heeded is put to the test again if too few of
    // them were verified to tell: without the predictor hardly any may be.
    static constexpr int kTrialAfter = 10'000, kLastTrialAfter = 1024 * kTrialAfter;
    // Drafts seen after which a predictor that is heeded again and not found wrong has passed.
    static constexpr int kTrialLasts = 10 * kTrialAfter;

    // Whether what was observed of verified drafts is further from what was predicted than it scatters.
    bool is_beyond_chance() const {
        const double mean = verified_.predicted / verified_.weight;
        const double variance =
            verified_.squared_weight() * (kScatter * mean * (1 + mean) + kLeastScatter);
        return std::abs(verified_.observed - verified_.predicted) > kFallbackDeviations * std::sqrt(variance);
    }

    // The predictor is heeded, and was not found wrong: the next trial, if any, is a first one.
    void end_trial() {
        is_on_trial_ = false;
        trial_after_ = kTrialAfter;
    }

    FallbackChange turn_fallback(int origin) {
        is_fallback_ = !is_fallback_;
        num_in_fallback_ = 0;
        const double weight = std::max(verified_.weight, 1.0);
        const FallbackChange change{origin, is_fallback_, verified_.predicted / weight, verified_.observed / weight};
        // Another rule chooses from now on, and the figures are to be those of its drafts.
        verified_ = {};
        return change;
    }

    // A Kalman filter's step. error: observed minus predicted. change: derivative of the prediction
    // with respect to the shift. scatter: variance of what is observed.
    void track(double error, double change, double scatter) {
        variance_ += kDrift;
        const double spread = change * change * variance_ + scatter;
        if (spread <= 0) return;  // nothing could have come otherwise
        const double gain = variance_ * change / spread;
        variance_ *= 1 - gain * change;
        shift_ = std::clamp(shift_ + gain * error, -kMaxShift, kMaxShift);
    }

    std::int64_t num_verified_ = 0;
    int num_in_fallback_ = 0;  // drafts seen since it began or was last judged
    int trial_after_ = kTrialAfter;
    int num_on_trial_ = 0;  // drafts seen since the last trial began
    bool is_on_trial_ = false;  // heeded again untested, and neither right nor long since
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

    // What the odds of each origin's drafts are multiplied by.
    std::array<double, kNumOrigins> factors() const {
        std::array<double, kNumOrigins> factors;
        for (std::size_t o = 0; o < factors.size(); ++o) factors[o] = std::exp(origins_[o].shift());
        return factors;
    }

    // Corrects the payoff and the probabilities of a draft, float[kMaxDepth] or null if they are not
    // known, by the factor of its origin, and keeps them until the cycle is observed.
    void expect(int slot, const CacheExpectation& expected, double factor, float& payoff, float* survival) {
        expected_.expect(slot, expected, factor, depth_, payoff, survival);
    }

    // Takes in what a cycle committed; nothing tells nothing. verified: of the cache draft, if any of it
    // was; expected accepted tokens that are not a number stand for the whole draft.
    std::optional<FallbackChange> observe(int slot, std::span<const std::int32_t> committed,
                                          std::optional<VerifiedCacheDraft> verified) {
        const CacheExpectation expected = expected_.take(slot);
        if (expected.draft_len == 0 || committed.empty()) return std::nullopt;
        OriginCalibration& of_origin = origins_[static_cast<std::size_t>(expected.origin)];
        of_origin.see_first_token(expected, committed[0] == expected.first_id, verified.has_value());
        if (verified) {
            if (std::isnan(verified->expected)) {
                verified->expected = expected.payoff;
                verified->num_tokens = expected.draft_len;
            }
            of_origin.see_verified(expected, *verified, depth_);
        }
        return of_origin.change_fallback(expected.origin, verified.has_value());
    }

private:
    int depth_;
    std::array<OriginCalibration, kNumOrigins> origins_{};
    CacheExpectations expected_;
};

}  // namespace sglang_hvd
