// How fast requests and steps go, so that what a step brings can be weighed against its time. It
// counts what the cost table says, not what a clock says: equal calls give equal results.
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

    // A new request has this slot; it begins at the mean of all.
    void start(int slot) {
        const auto place = static_cast<std::size_t>(slot);
        if (place >= of_requests_.size()) of_requests_.resize(2 * (place + 1));
        of_requests_[place] = of_all_;
    }

    // What one more token saves a request, in cycles.
    double token_value(int slot) const { return 1 / of_requests_[static_cast<std::size_t>(slot)]; }

    // What a millisecond of a step costs so many requests, in cycles. plain_ms: of a plain step of this
    // batch. Another batch, or another table, changes it at once; how much longer steps take than plain
    // ones changes slowly.
    double price(std::size_t num_requests, double plain_ms) const {
        return static_cast<double>(num_requests) / (of_plain_ * plain_ms);
    }

    // Takes in the time of a step, and of a plain step of the same batch.
    void see_step(double ms, double plain_ms) { of_plain_ += (1 - kKeptOfSteps) * (ms / plain_ms - of_plain_); }

    // Takes in how many tokens a cycle of each request committed.
    void see_tokens(std::span<const std::int32_t> slots, std::span<const std::int32_t> num_tokens) {
        double sum = 0;
        for (std::size_t i = 0; i < slots.size(); ++i) {
            double& of_request = of_requests_[static_cast<std::size_t>(slots[i])];
            const double of_cycle = std::max(num_tokens[i], 1);
            of_request += (1 - kKeptOfRequest) * (of_cycle - of_request);
            sum += of_cycle;
        }
        if (slots.empty()) return;
        // As if they had come one after the other.
        const auto num = static_cast<double>(slots.size());
        const double kept = std::pow(kKeptOfAll, num);
        of_all_ = kept * of_all_ + (1 - kept) * (sum / num);
    }

private:
    // What a mean keeps of itself with each further cycle or step.
    static constexpr double kKeptOfRequest = 0.9, kKeptOfAll = 0.98, kKeptOfSteps = 0.9;

    // Tokens per cycle, and the time of a step over that of a plain one, before anything was seen.
    static constexpr double kFirst = 2.0, kFirstStep = 1.0;

    std::vector<double> of_requests_;  // by slot; 0: nobody had it
    double of_all_ = kFirst, of_plain_ = kFirstStep;
};

}  // namespace sglang_hvd
