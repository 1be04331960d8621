// What was predicted of some events and what was observed.
#pragma once

namespace sglang_hvd {

// Sums over events, exponentially forgotten.
struct RunningReliability {
    // What a sum keeps of itself with each further event: the figures are of the last thousand or so.
    static constexpr double kKept = 0.999;

    double weight = 0, predicted = 0, observed = 0;

    void add(double what_was_predicted, double what_was_observed) {
        weight = weight * kKept + 1;
        predicted = predicted * kKept + what_was_predicted;
        observed = observed * kKept + what_was_observed;
    }

    // The events' squared weights: what the variance of `observed` is times that of an event.
    double squared_weight() const {
        const double left = 1 - weight * (1 - kKept);  // of a weight, since the first event
        return (1 - left * left) / (1 - kKept * kKept);
    }
};

}  // namespace sglang_hvd
