// Whether drafts pay where the device waits for the host before a step that may have some, and not
// before one without behind another such.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sglang_hvd {

// Behind a step with drafts the next one has to wait: how many tokens it begins behind is not known
// else. Behind one without it may be launched at once, without drafts. So drafts take, beside their own
// time, what that wait is not worth: it is made anyway where the steps that follow on drafts have good
// ones too. docs/allocation.md, "Waiting for tokens".
//
// gained_ms, more_ms: of a step's best drafts, see Allocation. wait_ms: before the next step.
class Waits {
public:
    // A step was waited for. Returns whether its drafts are chosen.
    bool pays(double gained_ms, double more_ms, double wait_ms) {
        expected_now_ = gained_ms;
        if (wait_ms <= 0) return true;  // no step need wait, or every step does
        const double most = most_lost(wait_ms), net = net_ms(gained_ms, more_ms, wait_ms);
        if (follows_drafts_) {
            const double weight = std::max(1 - kKept, 1 / (kBefore + static_cast<double>(++num_regained_)));
            regained_ += weight * (std::clamp((net - most) / wait_ms, 0.0, kMost) - regained_);
        }
        return net > most;
    }

    // Whether drafts that were found for a step without are worth a wait.
    bool is_worth_one(double gained_ms, double more_ms, double wait_ms) const {
        return net_ms(gained_ms, more_ms, wait_ms) > wait_ms + most_lost(wait_ms);
    }

    // Of every step. has_drafts: that were weighed against a wait.
    void end_step(bool has_drafts) {
        follows_drafts_ = has_drafts;
        // Also where no drafts are chosen: they would never be tried again.
        brought_ *= kKeptOfBrought;
        expected_ *= kKeptOfBrought;
    }

    // What the drafts brought that were chosen last, as time.
    void see(double brought_ms) {
        brought_ += brought_ms;
        expected_ += expected_now_;
    }

private:
    // What drafts bring beyond what they take. They are chosen where much is expected of them, and that
    // may be too much in the mean though it is right for all drafts together. Where they bring more than
    // is expected, those that are just worth it need not, and nothing is added.
    double net_ms(double gained_ms, double more_ms, double wait_ms) const {
        const double before = kWaitsBefore * wait_ms, expected = expected_ + before;
        const double share = expected > 0 ? std::clamp((brought_ + before) / expected, kLeast, 1.0) : 1.0;
        return share * gained_ms - more_ms;
    }

    // Of the wait behind drafts, what the drafts behind it do not bring in.
    double most_lost(double wait_ms) const { return std::max(1 - regained_, 0.0) * wait_ms; }

    // What the share keeps of itself with each further step behind drafts, less at first, as if so many
    // steps before had brought in all of the wait.
    static constexpr double kKept = 0.95, kBefore = 4;
    static constexpr double kMost = 3;  // waits that one step may bring in

    // Of what drafts brought and were expected to, what is kept with each further step; what they brought
    // before as expected, in waits; the least share that is believed.
    static constexpr double kKeptOfBrought = 0.998, kWaitsBefore = 5, kLeast = 0.5;

    std::int64_t num_regained_ = 0;  // steps behind drafts
    double regained_ = 1;  // share of the waits behind drafts that the steps behind them bring in
    bool follows_drafts_ = false;
    double expected_now_ = 0;            // of the step that was waited for last
    double brought_ = 0, expected_ = 0;  // by the latest steps that had drafts
};

}  // namespace sglang_hvd
