// Exploration by one rule: an option that has not run for long is due once, so that what is known of it cannot go
// stale. Options are widths, rounds of the drafters, and drafters.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sglang_hvd {

class Untried {
public:
    // after: an option is due after so many steps without it, and at most one in so many steps explores.
    explicit Untried(int after, std::size_t num_options = 0) : after_(after), since_(num_options) {}

    // A step starts, with so many options to choose from.
    void begin(std::size_t num_options = 0) {
        if (since_.size() < num_options) since_.resize(num_options);
        ++since_explored_;
        for (std::int64_t& steps : since_) ++steps;
    }

    bool may_explore() const { return since_explored_ > after_; }

    // rarer: so many times as many steps have to be without it.
    bool is_due(std::size_t option, std::size_t rarer = 1) const {
        return since_[option] > static_cast<std::int64_t>(rarer) * after_;
    }

    std::size_t num_options() const { return since_.size(); }
    std::int64_t since(std::size_t option) const { return since_[option]; }

    // The option that has not run for longest.
    std::size_t oldest() const {
        return static_cast<std::size_t>(std::max_element(since_.begin(), since_.end()) - since_.begin());
    }

    void run(std::size_t option) { since_[option] = 0; }
    void explore() { since_explored_ = 0; }

private:
    int after_;
    std::int64_t since_explored_ = 0;
    std::vector<std::int64_t> since_;
};

// Widths by about the number of requests, since times are learned by that number. Places are those of the widths,
// rising; place 0 is that of a plain step.
class UntriedWidths {
public:
    explicit UntriedWidths(int after) : after_(after) {}

    // A step of so many requests starts, with so many widths to choose from.
    void begin(std::size_t num_requests, std::size_t num_widths) {
        const auto of_size = static_cast<std::size_t>(std::bit_width(num_requests));
        if (by_size_.size() <= of_size) by_size_.resize(of_size + 1, {Untried(after_), Untried(after_)});
        now_ = &by_size_[of_size];
        num_widths_ = num_widths;
        now_->all.begin(num_widths);
        now_->best.begin(num_widths);
    }

    // Place of the width that this step must have; 0: any.
    std::size_t due() const {
        const std::size_t place = oldest();
        return now_->all.may_explore() && now_->all.is_due(place) ? place : 0;
    }

    // The step explores that width, even if its drafts fit a narrower one.
    void explore(std::size_t place) {
        now_->all.explore();
        now_->all.run(place);
    }

    // The step has this width. is_best: the search was free to choose it.
    void run(std::size_t place, bool is_best) {
        now_->all.run(place);
        if (is_best) now_->best.run(place);
    }

private:
    struct OfSize {
        Untried all, best;
    };

    // Place of the width that has not run for longest, up to the next wider than the ones that were best recently;
    // 0: only plain steps were.
    std::size_t oldest() const {
        std::size_t oldest = 0;
        for (std::size_t place = num_widths_; --place > 0;) {
            const bool is_last = !now_->best.is_due(place - 1) || !now_->best.is_due(place);
            const bool is_older = oldest > 0 && now_->all.since(place) >= now_->all.since(oldest);
            if (is_older || (oldest == 0 && is_last)) oldest = place;
        }
        return oldest;
    }

    int after_;
    std::vector<OfSize> by_size_;  // by bits of the number of requests
    OfSize* now_ = nullptr;
    std::size_t num_widths_ = 0;
};

}  // namespace sglang_hvd
