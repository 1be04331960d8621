// Which width is to be run, since none of late was: what a width seems to take it would else seem to take
// for ever.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sglang_hvd {

// Counts in steps of about as many requests, since times are learned by their number. Places are those of
// widths, rising; 0 is a plain step's.
class WidthLooks {
public:
    // after: so many steps without some width, and one has it; no more than one in so many is for that.
    explicit WidthLooks(int after) : after_(after) {}

    // A step of so many requests begins, with so many widths to choose from.
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

    // Place of the width that this step is to have; 0: any.
    std::size_t due() const {
        if (now_->since_look <= after_) return 0;
        const std::size_t place = longest_without();
        return now_->since[place] > after_ ? place : 0;
    }

    // It looked at that width, even if what it found fits a narrower one.
    void look(std::size_t place) { now_->since_look = now_->since[place] = 0; }

    // The step has this width. is_best: it was free to choose.
    void run(std::size_t place, bool is_best) {
        now_->since[place] = 0;
        if (is_best) now_->since_best[place] = 0;
    }

private:
    struct Counts {
        std::int64_t since_look = 0;
        std::vector<std::int64_t> since, since_best;  // by width
    };

    // Of those up to the next above what was best of late, or up to the widest if that was; 0: there is
    // none above a plain step.
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
