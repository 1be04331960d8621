// What is expected of each request's drafts, by slot, from the plan of a cycle until it is known what
// came of it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "reliability.hpp"
#include "request_track.hpp"

namespace sglang_hvd {

// What is expected of a cache draft. first_prob, reach_prob: probability that the first token and that
// the threshold's is accepted; not a number where nothing is known of them.
struct CacheExpectation {
    std::int32_t draft_len = 0;  // 0: nothing is expected
    std::int32_t origin = 0;
    std::int32_t first_id = 0;
    double payoff = 0;
    double first_prob = std::numeric_limits<double>::quiet_NaN();
    double reach_prob = std::numeric_limits<double>::quiet_NaN();
};

// A slot's place, made if it is new.
template <typename T>
T& at_slot(std::vector<T>& by_slot, int slot) {
    if (slot < 0) throw std::invalid_argument("a slot is not negative");
    const auto place = static_cast<std::size_t>(slot);
    if (place >= by_slot.size()) by_slot.resize(std::max(place + 1, 2 * by_slot.size()));
    return by_slot[place];
}

// The probabilities S of a draft become sigmoid(logit(S) + ln(factor)), without a logarithm: 0 and 1
// stay what they are. Returns what that adds to their sum.
inline double correct(double factor, int num_tokens, float* survival) {
    double added = 0;
    for (int j = 0; j < num_tokens; ++j) {
        const double before = survival[j];
        const double after = std::min(before * factor / (1 + before * (factor - 1)), 1.0);
        added += after - before;
        survival[j] = static_cast<float>(after);
    }
    return added;
}

class CacheExpectations {
public:
    // Corrects the payoff and the probabilities of a draft, float[kMaxDepth] or null if they are not
    // known, and keeps them.
    // depth: tokens of the threshold.
    void expect(int slot, CacheExpectation expected, double factor, int depth, float& payoff,
                float* survival) {
        if (expected.draft_len > 0) {
            if (survival != nullptr) {
                if (factor != 1)  // else no bit changes
                    payoff = static_cast<float>(payoff + correct(factor, kMaxDepth, survival));
                expected.first_prob = survival[0];
                expected.reach_prob = survival[depth - 1];
            }
            expected.payoff = payoff;
        }
        at_slot(by_slot_, slot) = expected;
    }

    // What was expected, once.
    CacheExpectation take(int slot) {
        const auto place = static_cast<std::size_t>(slot);
        CacheExpectation taken;
        if (place < by_slot_.size()) std::swap(taken, by_slot_[place]);
        return taken;
    }

private:
    std::vector<CacheExpectation> by_slot_;
};

// Where a token of the model drafter's draft stands beside the cache draft: the cache has it right,
// or is wrong there, or was wrong or at its end before, or proposed nothing at all.
enum Beside { kCacheRight, kCacheWrong, kAfterCache, kWithoutCache, kNumBeside };

// Probability that the model drafter has a token right if it had those before it.
using TokenProbs = std::array<double, kNumBeside>;

// P(the model drafter has more and more tokens right), token by token.
class ModelReach {
public:
    // survival: of the cache draft, float[kMaxDepth]; null: not known.
    ModelReach(const TokenProbs& probs, int draft_len, const float* survival)
        : probs_(probs), draft_len_(survival == nullptr ? 0 : draft_len), survival_(survival) {}

    double next() {
        if (draft_len_ == 0) return model_right_ *= probs_[kWithoutCache];
        const double right = step_ < std::min(draft_len_, kMaxDepth) ? survival_[step_] : 0;
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
    const float* survival_;
    // Both right up to here; the model drafter alone.
    double cache_right_ = 1, model_right_ = 1, alone_ = 0;
};

// Tokens of the model drafter's draft that are expected to be accepted.
inline double expected_of_model(const TokenProbs& probs, int num_steps, int draft_len,
                                const float* survival) {
    ModelReach reach(probs, draft_len, survival);
    double sum = 0;
    for (int step = 0; step < num_steps; ++step) sum += reach.next();
    return sum;
}

// The model drafter's draft in one size.
struct DraftSize {
    std::int32_t num_nodes;
    double odds;  // that a token is right, over those in the size that the probabilities are of
};

// What expected_of_model sums up, token by token: out[s] is the probability that more than s tokens
// are accepted, right[s] the same where the cache draft is right up to there. ratio: of the request.
inline void reaches_of_model(const TokenProbs& probs, int num_steps, int draft_len, const float* survival,
                             double ratio, DraftSize size, float* out, float* right) {
    ModelReach full(probs, draft_len, survival);
    const double if_right = probs[kCacheRight];
    double before = 1, reach = 1, reach_right = 1;
    for (int step = 0; step < num_steps; ++step) {
        const double all = full.next();
        const double prob = before > 0 ? std::min(all / before, 1.0) : 0;
        before = all;
        const auto smaller = [&](double p) { return p * size.odds / (1 + p * (size.odds - 1)); };
        const bool fits = step < size.num_nodes;  // no tree is deeper than it has nodes
        reach = fits ? reach * smaller(prob) : 0;
        reach_right = fits ? reach_right * smaller(if_right) : 0;
        out[step] = static_cast<float>(std::min(reach * ratio, 1.0));
        right[step] = static_cast<float>(std::min(reach_right * ratio, 1.0));
    }
}

// What is expected of a model drafter's draft.
struct ModelExpectation {
    std::vector<std::int32_t> cache_draft;
    double of_all = 0;  // without the request's own ratio
    double expected = 0;
    double came = 0, foreseen = 0;  // accepted tokens of the request's latest cycles, and of_all
    double ratio = 1;
};

// What was verified of the model drafter's draft, and what of it was accepted.
struct VerifiedModelDraft {
    int num_accepted;
    int num_nodes;    // its size; in few steps it may have fewer
    int num_steps;    // most tokens that could be accepted
    double expected;  // accepted tokens; not a number: the full size was verified, in all steps
};

// Before anything was seen: better than drafters are (eight steps then bring 5.1 tokens; the paper's
// three have 3.2, 2.2 and 0.8, appendix C), so that a drafter is tried until it is known. What is
// thought too little of would not be run, and nothing would correct it. The weight, in tokens, is also
// that with which the events of a kind begin at what all of them have.
constexpr double kPriorProb = 0.9, kPriorWeight = 16;

// What a count keeps of itself with each further token: the probabilities are of the last two thousand
// or so.
constexpr double kKept = 0.9995;

// A request's ratio is (tokens + prior) / (expected tokens + prior), over its latest cycles: of itself
// a sum keeps so much with each further one.
constexpr double kPriorTokens = 16, kKeptOfRequest = 0.98;

class ModelExpectations {
public:
    // full_size: nodes that the probabilities are of. size_effect: in log odds for each doubling of the
    // nodes.
    ModelExpectations(int num_steps, int full_size, double size_effect)
        : num_steps_(num_steps), full_size_(full_size), size_effect_(size_effect) {}

    void start(int slot) { at_slot(by_slot_, slot) = {}; }

    bool has(int slot) const { return slot >= 0 && static_cast<std::size_t>(slot) < by_slot_.size(); }
    ModelExpectation& at(int slot) { return by_slot_[static_cast<std::size_t>(slot)]; }

    std::int64_t num_verified() const { return num_verified_; }
    const RunningReliability& reliability() const { return reliability_; }

    // That a token of a draft of so many nodes is right, over those of the full size.
    double odds_of(int num_nodes) const {
        return std::exp(size_effect_ * std::log2(static_cast<double>(num_nodes) / full_size_));
    }

    float expect(int slot, std::span<const std::int32_t> cache_draft, const TokenProbs& probs,
                 const float* survival) {
        ModelExpectation& of_slot = at(slot);
        const auto num = std::min(cache_draft.size(), static_cast<std::size_t>(num_steps_) + 1);
        of_slot.cache_draft.assign(cache_draft.begin(), cache_draft.begin() + static_cast<std::ptrdiff_t>(num));
        of_slot.of_all =
            expected_of_model(probs, num_steps_, static_cast<int>(cache_draft.size()), survival);
        of_slot.expected = std::min(of_slot.of_all * of_slot.ratio, static_cast<double>(num_steps_));
        return static_cast<float>(of_slot.expected);
    }

    // Takes in a cycle that verified the model drafter's draft.
    void observe(int slot, std::span<const std::int32_t> committed, const VerifiedModelDraft& verified) {
        ModelExpectation& of_slot = at(slot);
        // expected: of that size and number of steps; of_all: without the request's ratio too.
        double expected = of_slot.expected, of_all = of_slot.of_all, odds = 1;
        int num_steps = num_steps_;
        if (!std::isnan(verified.expected)) {
            expected = verified.expected;
            of_all = expected / of_slot.ratio;
            odds = odds_of(verified.num_nodes);
            num_steps = std::min(verified.num_steps, verified.num_nodes);
        }
        const int num_accepted = verified.num_accepted;
        ++num_verified_;
        reliability_.add(expected, num_accepted);
        const std::vector<std::int32_t>& draft = of_slot.cache_draft;
        std::size_t agreeing = 0;
        while (agreeing < std::min(draft.size(), committed.size()) && draft[agreeing] == committed[agreeing])
            ++agreeing;
        // The accepted ones, and the one that was not, if a step was left for it and the text went on.
        const auto num_tokens = std::min({committed.size(), static_cast<std::size_t>(num_steps),
                                          static_cast<std::size_t>(num_accepted) + 1});
        for (std::size_t token = 0; token < num_tokens; ++token) {
            Beside beside = kAfterCache;
            if (draft.empty()) beside = kWithoutCache;
            else if (token < agreeing) beside = kCacheRight;
            else if (token == agreeing && token < draft.size()) beside = kCacheWrong;
            // A wrong token of a smaller draft is counted with the weight of its lower odds: right over
            // wrong are then the odds of the full size.
            const bool is_right = static_cast<int>(token) < num_accepted;
            right_[beside] = right_[beside] * kKept + is_right;
            seen_[beside] = seen_[beside] * kKept + (is_right ? 1 : odds);
        }
        of_slot.came = of_slot.came * kKeptOfRequest + num_accepted;
        of_slot.foreseen = of_slot.foreseen * kKeptOfRequest + of_all;
        of_slot.ratio = (of_slot.came + kPriorTokens) / (of_slot.foreseen + kPriorTokens);
    }

    TokenProbs probs() const {
        double right = 0, seen = 0;
        for (int kind = 0; kind < kNumBeside; ++kind) {
            right += right_[static_cast<std::size_t>(kind)];
            seen += seen_[static_cast<std::size_t>(kind)];
        }
        const double of_all = (right + kPriorProb * kPriorWeight) / (seen + kPriorWeight);
        TokenProbs probs;
        for (std::size_t kind = 0; kind < kNumBeside; ++kind)
            probs[kind] = (right_[kind] + of_all * kPriorWeight) / (seen_[kind] + kPriorWeight);
        return probs;
    }

private:
    int num_steps_, full_size_;
    double size_effect_;
    TokenProbs right_{}, seen_{};
    std::vector<ModelExpectation> by_slot_;
    std::int64_t num_verified_ = 0;
    RunningReliability reliability_;
};

}  // namespace sglang_hvd
