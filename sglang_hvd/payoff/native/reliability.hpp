// What was predicted of some events and what came of them.
#pragma once

namespace sglang_hvd {

// Sums over events, exponentially forgotten.
struct RunningReliability {
    // What a sum keeps of itself with each further event: the figures are of the last thousand or so.
    static constexpr double kKept = 0.999;

    double weight = 0, predicted = 0, came = 0;

    void add(double what_was_predicted, double what_came) {
        weight = weight * kKept + 1;
        predicted = predicted * kKept + what_was_predicted;
        came = came * kKept + what_came;
    }

    // The events' squared weights: what the variance of `came` is times that of an event.
    double squared_weight() const {
        const double left = 1 - weight * (1 - kKept);  // of a weight, since the first event
        return (1 - left * left) / (1 - kKept * kKept);
    }
};

}  // namespace sglang_hvd
