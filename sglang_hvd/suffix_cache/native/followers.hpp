// Groups places of a text by how long the tokens after them agree.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "token_text.hpp"

namespace sglang_hvd {

// How many tokens from this place on equal the given ones.
inline std::size_t num_following(const TokenText& text, Position place, std::span<const Token> tokens) {
    const auto max = std::min<std::size_t>(tokens.size(), text.end() - place);
    std::size_t num = 0;
    while (num < max) {
        const Token* here = text.before_end(place + static_cast<Position>(num));
        const auto piece = tokens.subspan(num, std::min<std::size_t>(kLookAhead, max - num));
        std::size_t same = 0;
        // If there are many places, most of them agree for long.
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

// The guide is the text after one of the places. Each place is compared with it once. After that, the
// places that follow the guide for so many tokens are known without looking at the others.
class Followers {
public:
    void clear() {
        places_.clear();
        next_.clear();
    }

    std::size_t size() const { return places_.size(); }
    std::span<const Token> guide() const { return guide_; }
    // How many places agree with the guide for exactly so many tokens.
    std::size_t num_leaving(std::size_t num_agreeing) const { return leaving_[num_agreeing].count; }
    // Of these the one that was added last.
    Position one_leaving(std::size_t num_agreeing) const { return places_[leaving_[num_agreeing].first]; }

    // Calls visit with each of them.
    template <typename Visit>
    void visit_leaving(std::size_t num_agreeing, Visit visit) const {
        for (auto i = leaving_[num_agreeing].first; i != kNone; i = next_[i]) visit(places_[i]);
    }

    void add(std::span<const Position> places) {
        places_.insert(places_.end(), places.begin(), places.end());
    }

    // Compares the places that were added. There must be at least one.
    void compare(const TokenText& text, std::size_t max_tokens) {
        // The earlier places may be unlike the new ones, and comparing them again adds little.
        if (places_.size() >= 8 * next_.size()) {
            guide_by(text, best_guide(text, max_tokens), max_tokens);
        } else {
            compare_rest(text);
        }
    }

    // Compares all places with at most max_tokens tokens after this one of them.
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

    // Of a few places the one with which the others agree for longest. Any place would do, but one that
    // leaves the others soon costs time.
    Position best_guide(const TokenText& text, std::size_t max_tokens) {
        constexpr std::size_t kCandidates = 8;
        if (places_.size() < 8 * kCandidates) return places_[places_.size() / 2];
        std::array<Position, kCandidates> candidates;
        for (std::size_t i = 0; i < kCandidates; ++i) {
            candidates[i] = places_[(2 * i + 1) * places_.size() / (2 * kCandidates)];
        }
        Position best = candidates[0];
        std::size_t max = 0;
        for (const Position candidate : candidates) {
            take_guide(text, candidate, max_tokens);
            std::size_t num = 0;
            for (const Position other : candidates) num += num_following(text, other, guide_);
            if (num > max) {
                max = num;
                best = candidate;
            }
        }
        return best;
    }

    struct Leaving {
        std::uint32_t first = kNone;  // in places_; next_ leads to the others
        std::uint32_t count = 0;
    };
    std::vector<Position> places_;
    std::vector<Token> guide_;
    std::vector<Leaving> leaving_;     // by the number of tokens that agree
    std::vector<std::uint32_t> next_;  // for each place, another one that agrees for as many tokens
};

}  // namespace sglang_hvd
