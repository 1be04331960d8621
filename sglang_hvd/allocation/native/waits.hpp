// Decides whether drafts pay for a wait: before a step that may have drafts the device waits for the host, but not
// before a step without drafts that follows another such step.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sglang_hvd {

// After a step with drafts the next one has to wait, since the number of accepted tokens is not known before. After
// a step without drafts the next one can be launched at once, without drafts. So drafts cost their own time and, in
// addition, the part of that wait that is lost: the wait is not lost if the following step has good drafts, too.
// docs/experiments/allocation.md, "Running ahead".
//
// gained_ms, more_ms: of a step's best drafts, see Allocation. wait_ms: the wait before the next step.
class Waits {
public:
    // A step was waited for. Returns whether its drafts are chosen.
    bool pays(double gained_ms, double more_ms, double wait_ms) {
        predicted_now_ = gained_ms;
        if (wait_ms <= 0) return true;  // no step need wait, or every step does
        const double lost = max_lost(wait_ms), net = net_ms(gained_ms, more_ms, wait_ms);
        if (follows_drafts_) {
            const double weight = std::max(1 - kKept, 1 / (kBefore + static_cast<double>(++num_regained_)));
            regained_ += weight * (std::clamp((net - lost) / wait_ms, 0.0, kMaxRegained) - regained_);
        }
        return net > lost;
    }

    // Whether the drafts that were found for a step without drafts are worth a wait.
    bool is_worth_one(double gained_ms, double more_ms, double wait_ms) const {
        return net_ms(gained_ms, more_ms, wait_ms) > wait_ms + max_lost(wait_ms);
    }

    // Called for every step. has_drafts: the step has drafts that were weighed against a wait.
    void end_step(bool has_drafts) {
        follows_drafts_ = has_drafts;
        // Also if no drafts are chosen, since they would never be tried again.
        gained_ *= kKeptOfGains;
        predicted_ *= kKeptOfGains;
    }

    // The gain of the drafts that were chosen last, as time.
    void see(double gained_ms) {
        gained_ += gained_ms;
        predicted_ += predicted_now_;
    }

private:
    // The gain of drafts beyond their costs. Drafts are chosen if their predicted gain is high, and for these the
    // prediction can be too high on average although it is right for all drafts together. If drafts gain more than
    // predicted, this need not hold for those that barely pay, so nothing is added.
    double net_ms(double gained_ms, double more_ms, double wait_ms) const {
        const double before = kWaitsBefore * wait_ms, predicted = predicted_ + before;
        const double share = predicted > 0 ? std::clamp((gained_ + before) / predicted, kMinShare, 1.0) : 1.0;
        return share * gained_ms - more_ms;
    }

    // The part of the wait after drafts that the drafts of the following step do not regain.
    double max_lost(double wait_ms) const { return std::max(1 - regained_, 0.0) * wait_ms; }

    // The part of the regained share that is kept with each further step after drafts. It starts as if kBefore
    // steps had regained all of the wait.
    static constexpr double kKept = 0.95, kBefore = 4;
    static constexpr double kMaxRegained = 3;  // waits that one step may regain

    // The part of gains and predicted gains that is kept with each further step; the prior, in waits, in which both
    // are equal; the minimum of their ratio.
    static constexpr double kKeptOfGains = 0.998, kWaitsBefore = 5, kMinShare = 0.5;

    std::int64_t num_regained_ = 0;  // steps after drafts
    double regained_ = 1;            // share of the waits after drafts that the following steps regain
    bool follows_drafts_ = false;
    double predicted_now_ = 0;           // gain of the step that was waited for last
    double gained_ = 0, predicted_ = 0;  // by the latest steps that had drafts
};

}  // namespace sglang_hvd
