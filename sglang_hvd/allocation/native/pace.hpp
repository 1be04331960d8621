// How fast requests and steps have been recently, so that the gain of a step can be weighed against its time.
// Times come from the cost table, not from a clock: equal calls give equal results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sglang_hvd {

class Pace {
public:
    // Whether a request had this slot.
    bool has(int slot) const {
        const auto place = static_cast<std::size_t>(slot);
        return slot >= 0 && place < of_requests_.size() && of_requests_[place] > 0;
    }

    // A new request has this slot; it starts with the mean of all requests.
    void start(int slot) {
        const auto place = static_cast<std::size_t>(slot);
        if (place >= of_requests_.size()) of_requests_.resize(2 * (place + 1));
        of_requests_[place] = of_all_;
    }

    // The cycles that one more token saves a request.
    double token_value(int slot) const { return 1 / of_requests_[static_cast<std::size_t>(slot)]; }

    // The cycles that a millisecond of a step costs so many requests. plain_ms: time of a plain step of this
    // batch, so another batch or another table changes the price at once. The ratio of the steps' times to those
    // of plain steps changes slowly.
    double price(std::size_t num_requests, double plain_ms) const {
        return static_cast<double>(num_requests) / (of_plain_ * plain_ms);
    }

    // Learns from the time of a step, and of a plain step of the same batch.
    void see_step(double ms, double plain_ms) { of_plain_ += (1 - kKeptOfSteps) * (ms / plain_ms - of_plain_); }

    // Learns from the number of tokens that a cycle of each request committed.
    void see_tokens(std::span<const std::int32_t> slots, std::span<const std::int32_t> num_tokens) {
        double sum = 0;
        for (std::size_t i = 0; i < slots.size(); ++i) {
            double& of_request = of_requests_[static_cast<std::size_t>(slots[i])];
            const double of_cycle = std::max(num_tokens[i], 1);
            of_request += (1 - kKeptOfRequest) * (of_cycle - of_request);
            sum += of_cycle;
        }
        if (slots.empty()) return;
        // The same as if the cycles had ended one after the other.
        const auto num = static_cast<double>(slots.size());
        const double kept = std::pow(kKeptOfAll, num);
        of_all_ = kept * of_all_ + (1 - kept) * (sum / num);
    }

private:
    // The part of a mean that is kept with each further cycle or step.
    static constexpr double kKeptOfRequest = 0.9, kKeptOfAll = 0.98, kKeptOfSteps = 0.9;

    // Before any step: tokens per cycle, and the time of a step divided by that of a plain one.
    static constexpr double kFirst = 2.0, kFirstStep = 1.0;

    std::vector<double> of_requests_;  // by slot; 0: nobody had it
    double of_all_ = kFirst, of_plain_ = kFirstStep;
};

}  // namespace sglang_hvd
