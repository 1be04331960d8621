// Exploration of widths: a step has a width that has not run recently, so that the width's time cannot go stale.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sglang_hvd {

// Counts steps by about their number of requests, since times are learned by that number. Places are those of the
// widths, rising; place 0 is that of a plain step.
class WidthLooks {
public:
    // after: after so many steps without some width, one step has it; at most one in so many steps explores.
    explicit WidthLooks(int after) : after_(after) {}

    // A step of so many requests starts, with so many widths to choose from.
    void begin(std::size_t num_requests, std::size_t num_widths) {
        const auto of_size = static_cast<std::size_t>(std::bit_width(num_requests));
        if (by_size_.size() <= of_size) by_size_.resize(of_size + 1);
        now_ = &by_size_[of_size];
        num_widths_ = num_widths;
        if (now_->since.size() < num_widths) {
            now_->since.resize(num_widths);
            now_->since_best.resize(num_widths);
        }
        ++now_->since_look;
        for (std::int64_t& steps : now_->since) ++steps;
        for (std::int64_t& steps : now_->since_best) ++steps;
    }

    // Place of the width that this step must have; 0: any.
    std::size_t due() const {
        if (now_->since_look <= after_) return 0;
        const std::size_t place = longest_without();
        return now_->since[place] > after_ ? place : 0;
    }

    // The step explored that width, even if its drafts fit a narrower one.
    void look(std::size_t place) { now_->since_look = now_->since[place] = 0; }

    // The step has this width. is_best: the search was free to choose it.
    void run(std::size_t place, bool is_best) {
        now_->since[place] = 0;
        if (is_best) now_->since_best[place] = 0;
    }

private:
    struct Counts {
        std::int64_t since_look = 0;
        std::vector<std::int64_t> since, since_best;  // by width
    };

    // Place of the width that has not run for longest, up to the next wider than the ones that were best recently;
    // 0: only plain steps were.
    std::size_t longest_without() const {
        std::size_t longest = 0;
        for (std::size_t place = num_widths_; --place > 0;) {
            const bool is_last = std::min(now_->since_best[place - 1], now_->since_best[place]) <= after_;
            const bool is_longer = longest > 0 && now_->since[place] >= now_->since[longest];
            if (is_longer || (longest == 0 && is_last)) longest = place;
        }
        return longest;
    }

    int after_;
    std::vector<Counts> by_size_;  // by bits of the number of requests
    Counts* now_ = nullptr;
    std::size_t num_widths_ = 0;
};

}  // namespace sglang_hvd
