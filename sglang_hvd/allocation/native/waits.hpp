// Whether drafts pay where the device waits for the host before a step that may have some, and not
// before one without behind another such.
#pragma once

#include <algorithm>

namespace sglang_hvd {

// Behind a step with drafts the next one has to wait: how many tokens it begins behind is not known
// else. Behind one without it may be launched at once, without drafts. So drafts take, beside their own
// time, what that wait is not worth: it is made anyway where the steps that follow on drafts have good
// ones too. docs/allocation.md, "Waiting for tokens".
class Waits {
public:
    // A step was waited for. net_ms: what its best drafts bring beyond their time; wait_ms: of the next
    // one. Returns whether they are chosen.
    bool pays(double net_ms, double wait_ms) {
        if (wait_ms <= 0) return true;  // no step need wait, or every step does
        const double most = most_lost(wait_ms);
        if (follows_drafts_) regained_ += (1 - kKept) * (std::clamp((net_ms - most) / wait_ms, 0.0, kMost) - regained_);
        return net_ms > most;
    }

    // Whether drafts that were found for a step without are worth a wait.
    bool is_worth_one(double net_ms, double wait_ms) const {
        return net_ms > wait_ms + most_lost(wait_ms);  // neither is negative
    }

    // has_drafts: that were weighed against a wait.
    void end_step(bool has_drafts) { follows_drafts_ = has_drafts; }

private:
    // Of the wait behind drafts, what the drafts behind it do not bring in.
    double most_lost(double wait_ms) const { return std::max(1 - regained_, 0.0) * wait_ms; }

    static constexpr double kKept = 0.95;
    static constexpr double kMost = 3;  // waits that one step may bring in

    double regained_ = 1;  // share of the waits behind drafts that the steps behind them bring in
    bool follows_drafts_ = false;
};

}  // namespace sglang_hvd
