// Places of a text, by how long what follows them is the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "token_text.hpp"

namespace sglang_hvd {

// How many tokens from this place on are the same as these.
inline std::size_t num_following(const TokenText& text, Position place, std::span<const Token> tokens) {
    const auto most = std::min<std::size_t>(tokens.size(), text.end() - place);
    std::size_t num = 0;
    while (num < most) {
        const Token* here = text.before_end(place + static_cast<Position>(num));
        const auto piece = tokens.subspan(num, std::min<std::size_t>(kLookAhead, most - num));
        std::size_t same = 0;
        // Where time matters, most agree for long.
        constexpr std::size_t kAtOnce = 8;
        while (same + kAtOnce <= piece.size() &&
               std::memcmp(here + same, &piece[same], kAtOnce * sizeof(Token)) == 0) {
            same += kAtOnce;
        }
        while (same < piece.size() && here[same] == piece[same]) ++same;
        num += same;
        if (same < piece.size()) break;
    }
    return num;
}

// Each place is compared once with the guide, what follows one of them. How many of them follow it
// for some tokens, and who leaves it then, needs no look at the others any more.
class Followers {
public:
    void clear() {
        places_.clear();
        next_.clear();
    }

    std::size_t size() const { return places_.size(); }
    std::span<const Token> guide() const { return guide_; }
    // How many agree with the guide for just so many tokens.
    std::size_t num_leaving(std::size_t num_agreeing) const { return leaving_[num_agreeing].count; }
    // The latest that was added of those.
    Position one_leaving(std::size_t num_agreeing) const { return places_[leaving_[num_agreeing].first]; }

    // Calls this with each of those.
    template <typename Visit>
    void visit_leaving(std::size_t num_agreeing, Visit visit) const {
        for (auto i = leaving_[num_agreeing].first; i != kNone; i = next_[i]) visit(places_[i]);
    }

    void add(std::span<const Position> places) {
        places_.insert(places_.end(), places.begin(), places.end());
    }

    // Takes the places in that were added, at least one at first.
    void compare(const TokenText& text, std::size_t max_tokens) {
        // Those of before may be unlike them; to compare them again adds little.
        if (places_.size() >= 8 * next_.size()) {
            guide_by(text, best_guide(text, max_tokens), max_tokens);
        } else {
            compare_rest(text);
        }
    }

    // Compares all with at most so many tokens after this one of the places.
    void guide_by(const TokenText& text, Position place, std::size_t max_tokens) {
        take_guide(text, place, max_tokens);
        leaving_.assign(guide_.size() + 1, {});
        next_.clear();
        compare_rest(text);
    }

private:
    static constexpr std::uint32_t kNone = ~std::uint32_t{0};

    void take_guide(const TokenText& text, Position place, std::size_t max_tokens) {
        guide_.clear();
        while (guide_.size() < max_tokens) {
            const Token token = text.token(place + static_cast<Position>(guide_.size()));
            if (token == kEnd) break;
            guide_.push_back(token);
        }
    }

    void compare_rest(const TokenText& text) {
        for (std::size_t i = next_.size(); i < places_.size(); ++i) {
            Leaving& leaving = leaving_[num_following(text, places_[i], guide_)];
            next_.push_back(leaving.first);
            leaving.first = static_cast<std::uint32_t>(i);
            ++leaving.count;
        }
    }

    // Of a few places that with which the others agree for longest. Any would do; one that leaves
    // the others soon costs time.
    Position best_guide(const TokenText& text, std::size_t max_tokens) {
        constexpr std::size_t kCandidates = 8;
        if (places_.size() < 8 * kCandidates) return places_[places_.size() / 2];
        std::array<Position, kCandidates> candidates;
        for (std::size_t i = 0; i < kCandidates; ++i) {
            candidates[i] = places_[(2 * i + 1) * places_.size() / (2 * kCandidates)];
        }
        Position best = candidates[0];
        std::size_t most = 0;
        for (const Position candidate : candidates) {
            take_guide(text, candidate, max_tokens);
            std::size_t num = 0;
            for (const Position other : candidates) num += num_following(text, other, guide_);
            if (num > most) {
                most = num;
                best = candidate;
            }
        }
        return best;
    }

    struct Leaving {
        std::uint32_t first = kNone;  // of places_; the others by next_
        std::uint32_t count = 0;
    };
    std::vector<Position> places_;
    std::vector<Token> guide_;
    std::vector<Leaving> leaving_;     // by the number of tokens that agree
    std::vector<std::uint32_t> next_;  // of each place: another that agrees for as many
};

}  // namespace sglang_hvd
