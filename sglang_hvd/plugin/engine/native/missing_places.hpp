// Which tokens the draft KV cache of each request lacks, and where each is kept; see missing_tokens.py. Requests are
// known by their slots, kept tokens by their places in one array.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace sglang_hvd {

class MissingPlaces {
public:
    using Ints = std::span<const std::int64_t>;

    // What was committed: its places, and its nodes in the verification.
    struct Settled {
        std::vector<std::int64_t> places, nodes;
    };

    // A verification of these requests, `width` nodes each. cached_lens: tokens in the KV caches before it.
    void keep(Ints slots, Ints cached_lens, std::int64_t width) {
        for (const auto slot : slots) at(slot);  // a bad slot changes nothing
        verified_.clear();
        for (std::size_t i = 0; i < slots.size(); ++i) verified_.push_back({slots[i], cached_lens[i], false});
        width_ = width;
    }

    // Adds what was committed of the last verification. cached_lens: of these requests now. What is kept of others is
    // dropped.
    Settled settle(Ints slots, Ints cached_lens) {
        for (Request& request : requests_) request.cached_len = kAway;
        for (std::size_t i = 0; i < slots.size(); ++i) at(slots[i]).cached_len = cached_lens[i];
        for (Request& request : requests_)
            if (request.cached_len == kAway) drop(request);
        Settled settled;
        for (std::size_t row = 0; row < verified_.size(); ++row) {
            const Verified& before = verified_[row];
            Request& request = at(before.slot);
            if (before.is_forgotten || request.cached_len == kAway) continue;
            const std::int64_t num = request.cached_len - before.cached_len;
            if (num < 1 || num > width_) {  // the lengths do not fit this verification
                drop(request);
                continue;
            }
            for (std::int64_t node = 0; node < num; ++node) {
                request.places.push_back(free_place());
                settled.places.push_back(request.places.back());
                settled.nodes.push_back(static_cast<std::int64_t>(row) * width_ + node);
            }
        }
        verified_.clear();
        return settled;
    }

    // A prefill wrote all of the draft KV cache of these requests.
    void forget(Ints slots) {
        for (const auto slot : slots) {
            drop(at(slot));
            for (Verified& of : verified_) of.is_forgotten |= of.slot == slot;
        }
    }

    // The places of what these requests lack, one request after the other. They are free now.
    std::vector<std::int64_t> take(Ints slots) {
        std::vector<std::int64_t> taken;
        for (const auto slot : slots) {
            Request& request = at(slot);
            taken.insert(taken.end(), request.places.begin(), request.places.end());
            drop(request);
        }
        return taken;
    }

    // Tokens that each of these requests lacks.
    std::vector<std::int64_t> num_of(Ints slots) {
        std::vector<std::int64_t> num;
        for (const auto slot : slots) num.push_back(static_cast<std::int64_t>(at(slot).places.size()));
        return num;
    }

    // Every place is less.
    std::int64_t num_places() const { return num_places_; }

private:
    static constexpr std::int64_t kAway = -1;

    struct Request {
        std::vector<std::int64_t> places;  // in the order of its tokens
        std::int64_t cached_len = kAway;
    };

    struct Verified {
        std::int64_t slot, cached_len;
        bool is_forgotten;
    };

    Request& at(std::int64_t slot) {
        if (slot < 0) throw std::invalid_argument("slot " + std::to_string(slot) + " is negative");
        const auto place = static_cast<std::size_t>(slot);
        if (place >= requests_.size()) requests_.resize(place + 1);
        return requests_[place];
    }

    void drop(Request& request) {
        free_.insert(free_.end(), request.places.begin(), request.places.end());
        request.places.clear();
    }

    std::int64_t free_place() {
        if (free_.empty()) return num_places_++;
        const auto place = free_.back();
        free_.pop_back();
        return place;
    }

    std::vector<Request> requests_;  // by slot
    std::vector<Verified> verified_;
    std::vector<std::int64_t> free_;
    std::int64_t width_ = 0, num_places_ = 0;
};

}  // namespace sglang_hvd
