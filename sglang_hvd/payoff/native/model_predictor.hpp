// Predicts how many tokens of the model drafter's draft are accepted, and learns from what was.
// model_predictor.py has the formulas.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "calibration.hpp"
#include "request_track.hpp"

namespace sglang_hvd {

// How the cache draft compares at a token of the model drafter's draft: the cache has the token right; it is
// wrong here for the first time; it was wrong or ended before; it proposes nothing at all.
enum CacheState { kCacheRight, kCacheWrong, kAfterCache, kWithoutCache, kNumCacheStates };

// By CacheState, the probability that the model drafter has a token right if it had those before it.
using TokenProbs = std::array<double, kNumCacheStates>;

// Probability that the model drafter has the first 1, 2, ... tokens right; one value for each call of next().
class ModelAcceptance {
public:
    // cache_acceptance: of the cache draft, float[kMaxDepth]; null if it is unknown.
    ModelAcceptance(const TokenProbs& probs, int draft_len, const float* cache_acceptance)
        : probs_(probs), draft_len_(cache_acceptance == nullptr ? 0 : draft_len), cache_acceptance_(cache_acceptance) {}

    double next() {
        if (draft_len_ == 0) return model_right_ *= probs_[kWithoutCache];
        const double right = step_ < std::min(draft_len_, kMaxDepth) ? cache_acceptance_[step_] : 0;
        const double leaves = model_right_ * (cache_right_ - right);
        alone_ = alone_ * probs_[kAfterCache] +
                 leaves * probs_[step_ < draft_len_ ? kCacheWrong : kAfterCache];
        model_right_ *= probs_[kCacheRight];
        cache_right_ = right;
        ++step_;
        return model_right_ * cache_right_ + alone_;
    }

private:
    TokenProbs probs_;
    int draft_len_, step_ = 0;
    const float* cache_acceptance_;
    // So far: the cache is right; the model drafter is right given that; only the model drafter is right.
    double cache_right_ = 1, model_right_ = 1, alone_ = 0;
};

// Predicted accepted tokens of the model drafter's draft.
inline double predicted_len(const TokenProbs& probs, int num_steps, int draft_len, const float* cache_acceptance) {
    ModelAcceptance acceptance(probs, draft_len, cache_acceptance);
    double sum = 0;
    for (int step = 0; step < num_steps; ++step) sum += acceptance.next();
    return sum;
}

// One size of the model drafter's draft.
struct SizeOdds {
    std::int32_t num_nodes;
    double odds;  // odds that a token is right, over those of the full size
};

// The terms of predicted_len for one size and request. acceptance[s]: probability that more than s tokens are
// accepted; if_cache_right[s]: the same if the cache draft is right so far. ratio: of the request.
inline void write_model_acceptance(const TokenProbs& probs, int num_steps, int draft_len, const float* cache_acceptance,
                             double ratio, SizeOdds size, float* acceptance, float* if_cache_right) {
    ModelAcceptance full(probs, draft_len, cache_acceptance);
    const double prob_if_right = probs[kCacheRight];
    double before = 1, so_far = 1, so_far_if_right = 1;
    for (int step = 0; step < num_steps; ++step) {
        const double all = full.next();
        const double prob = before > 0 ? std::min(all / before, 1.0) : 0;
        before = all;
        const auto in_size = [&](double p) { return p * size.odds / (1 + p * (size.odds - 1)); };
        const bool fits = step < size.num_nodes;  // no tree is deeper than it has nodes
        so_far = fits ? so_far * in_size(prob) : 0;
        so_far_if_right = fits ? so_far_if_right * in_size(prob_if_right) : 0;
        acceptance[step] = static_cast<float>(std::min(so_far * ratio, 1.0));
        if_cache_right[step] = static_cast<float>(std::min(so_far_if_right * ratio, 1.0));
    }
}

// What is predicted for a request's model draft, and what its latest cycles gave.
struct ModelPrediction {
    std::vector<std::int32_t> cache_draft;
    double without_ratio = 0;  // predicted accepted tokens, before the request's ratio is applied
    double accepted_len = 0;   // predicted accepted tokens
    double sum_accepted = 0, sum_predicted = 0;  // tokens of the latest cycles; predicted without the ratio
    double ratio = 1;
};

// The verification of a model draft.
struct VerifiedModelDraft {
    int num_accepted;
    int num_nodes;     // its size; with few steps it may have fewer
    int num_steps;     // max tokens that could be accepted
    double predicted;  // accepted tokens; NaN: the full size was verified, in all steps
};

// The probabilities start higher than drafters deserve (eight steps then give 5.1 tokens; the paper's three
// drafters have 3.2, 2.2 and 0.8, appendix C). A drafter that starts too low would not run, and nothing would
// correct its probabilities. The weight, in tokens, also draws each state's probability to that of all states.
constexpr double kPriorProb = 0.9, kPriorWeight = 16;

// Factor applied to each count per further token: the probabilities cover roughly the last two thousand.
constexpr double kKept = 0.9995;

// A request's ratio is (accepted + prior) / (predicted + prior), in tokens of its latest cycles. The factor is
// applied to both sums per cycle.
constexpr double kPriorTokens = 16, kKeptOfRequest = 0.98;

class ModelPredictor {
public:
    // full_size: nodes of the draft that the probabilities hold for. size_effect: change of the log odds for
    // each doubling of the nodes.
    ModelPredictor(int num_steps, int full_size, double size_effect)
        : num_steps_(num_steps), full_size_(full_size), size_effect_(size_effect) {}

    void start(int slot) { at_slot(by_slot_, slot) = {}; }

    bool has(int slot) const { return slot >= 0 && static_cast<std::size_t>(slot) < by_slot_.size(); }
    ModelPrediction& at(int slot) { return by_slot_[static_cast<std::size_t>(slot)]; }

    int num_steps() const { return num_steps_; }
    std::int64_t num_verified() const { return num_verified_; }
    const RunningReliability& reliability() const { return reliability_; }

    // Odds that a token of a draft of this size is right, over those of the full size.
    double odds_of(int num_nodes) const {
        return std::exp(size_effect_ * std::log2(static_cast<double>(num_nodes) / full_size_));
    }

    float predict(int slot, std::span<const std::int32_t> cache_draft, const TokenProbs& probs,
                  const float* cache_acceptance) {
        ModelPrediction& of_slot = at(slot);
        const auto num = std::min(cache_draft.size(), static_cast<std::size_t>(num_steps_) + 1);
        of_slot.cache_draft.assign(cache_draft.begin(), cache_draft.begin() + static_cast<std::ptrdiff_t>(num));
        of_slot.without_ratio =
            predicted_len(probs, num_steps_, static_cast<int>(cache_draft.size()), cache_acceptance);
        of_slot.accepted_len =
            std::min(of_slot.without_ratio * of_slot.ratio, static_cast<double>(num_steps_));
        return static_cast<float>(of_slot.accepted_len);
    }

    // Learns from a cycle that verified the model drafter's draft.
    void observe(int slot, std::span<const std::int32_t> committed, const VerifiedModelDraft& verified) {
        ModelPrediction& of_slot = at(slot);
        double predicted = of_slot.accepted_len, without_ratio = of_slot.without_ratio, odds = 1;
        int num_steps = num_steps_;
        if (!std::isnan(verified.predicted)) {
            predicted = verified.predicted;
            without_ratio = predicted / of_slot.ratio;
            odds = odds_of(verified.num_nodes);
            num_steps = std::min(verified.num_steps, verified.num_nodes);
        }
        const int num_accepted = verified.num_accepted;
        ++num_verified_;
        reliability_.observe(predicted, num_accepted);
        const std::vector<std::int32_t>& draft = of_slot.cache_draft;
        std::size_t agreeing = 0;
        while (agreeing < std::min(draft.size(), committed.size()) && draft[agreeing] == committed[agreeing])
            ++agreeing;
        // The accepted tokens, and the rejected one if there was a step for it and the text continued.
        const auto num_tokens = std::min({committed.size(), static_cast<std::size_t>(num_steps),
                                          static_cast<std::size_t>(num_accepted) + 1});
        for (std::size_t token = 0; token < num_tokens; ++token) {
            CacheState state = kAfterCache;
            if (draft.empty()) state = kWithoutCache;
            else if (token < agreeing) state = kCacheRight;
            else if (token == agreeing && token < draft.size()) state = kCacheWrong;
            // A wrong token of a smaller draft has the weight of its lower odds, so that right over wrong
            // remain the odds of the full size.
            const bool is_right = static_cast<int>(token) < num_accepted;
            num_right_[state] = num_right_[state] * kKept + is_right;
            num_seen_[state] = num_seen_[state] * kKept + (is_right ? 1 : odds);
        }
        of_slot.sum_accepted = of_slot.sum_accepted * kKeptOfRequest + num_accepted;
        of_slot.sum_predicted = of_slot.sum_predicted * kKeptOfRequest + without_ratio;
        of_slot.ratio = (of_slot.sum_accepted + kPriorTokens) / (of_slot.sum_predicted + kPriorTokens);
    }

    TokenProbs probs() const {
        double right = 0, seen = 0;
        for (int state = 0; state < kNumCacheStates; ++state) {
            right += num_right_[static_cast<std::size_t>(state)];
            seen += num_seen_[static_cast<std::size_t>(state)];
        }
        const double of_all = (right + kPriorProb * kPriorWeight) / (seen + kPriorWeight);
        TokenProbs probs;
        for (std::size_t state = 0; state < kNumCacheStates; ++state)
            probs[state] = (num_right_[state] + of_all * kPriorWeight) / (num_seen_[state] + kPriorWeight);
        return probs;
    }

private:
    int num_steps_, full_size_;
    double size_effect_;
    TokenProbs num_right_{}, num_seen_{};
    std::vector<ModelPrediction> by_slot_;
    std::int64_t num_verified_ = 0;
    RunningReliability reliability_;
};

}  // namespace sglang_hvd
