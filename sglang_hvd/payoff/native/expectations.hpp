// What is expected of each request's drafts, by slot, from the plan of a cycle until it is known what
// came of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "request_track.hpp"

namespace sglang_hvd {

// Of the cache draft. The probabilities, that the first token and that the threshold's is accepted,
// are not numbers where nothing is known of them.
struct CacheExpectation {
    std::int32_t draft_len = 0;  // 0: nothing is expected
    std::int32_t origin = 0;
    std::int32_t first_id = 0;
    double payoff = 0;
    double first_prob = std::numeric_limits<double>::quiet_NaN();
    double reach_prob = std::numeric_limits<double>::quiet_NaN();
};

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
        const auto place = static_cast<std::size_t>(slot);
        if (place >= by_slot_.size()) by_slot_.resize(std::max(place + 1, 2 * by_slot_.size()));
        by_slot_[place] = expected;
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

// Mean accepted tokens of the model drafter's draft in the cycles without a cache draft, and in those
// where the cache draft's first token is wrong, or right.
struct ModelMeans {
    double without, wrong, right;
};

// Of the model drafter's draft.
struct ModelExpectation {
    std::int32_t first_id = -1;  // of the cache draft; -1: there is none
    double of_all = 0;           // without the request's own ratio
    double expected = 0;
    double ratio = 1;
};

class ModelExpectations {
public:
    void start(int slot) {
        const auto place = static_cast<std::size_t>(slot);
        if (place >= by_slot_.size()) by_slot_.resize(std::max(place + 1, 2 * by_slot_.size()));
        by_slot_[place] = {};
    }

    bool has(int slot) const { return slot >= 0 && static_cast<std::size_t>(slot) < by_slot_.size(); }
    ModelExpectation& at(int slot) { return by_slot_[static_cast<std::size_t>(slot)]; }

    // first_id: of the cache draft; -1: there is none. prob: that it is right. most: accepted tokens.
    float expect(int slot, std::int32_t first_id, double prob, const ModelMeans& means, double most) {
        ModelExpectation& of_slot = at(slot);
        of_slot.first_id = first_id;
        of_slot.of_all =
            first_id < 0 ? means.without : means.wrong + prob * (means.right - means.wrong);
        of_slot.expected = std::min(of_slot.of_all * of_slot.ratio, most);
        return static_cast<float>(of_slot.expected);
    }

private:
    std::vector<ModelExpectation> by_slot_;
};

}  // namespace sglang_hvd
