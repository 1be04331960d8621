// Follows a request: what its cycles so far tell about its next cache draft.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "text_tail.hpp"
#include "token_flags.hpp"
#include "token_outcomes.hpp"

namespace sglang_hvd {

constexpr int kMaxDepth = 64;        // max tokens of a draft that are looked at
constexpr int kNumDecays = 4;        // half-lives of the moving shares, in tokens
constexpr int kNumCyclesSeen = 4;    // latest cycles with features of their own
constexpr std::array<float, kNumDecays> kHalfLives = {4.f, 16.f, 64.f, 256.f};

// Probabilities that each of a draft's first tokens is right if those before it are. Past the end of the draft
// they are unspecified.
constexpr int kOutcomeDepth = 6;
struct OutcomeProbs {
    std::array<float, kOutcomeDepth> of_own{}, of_all{};
};

// The paper's features cover the latest cycles that verified a cache draft. The others cover every cycle: even
// if the model drafter's draft was verified, the committed tokens show how much of the cache draft was right
// ("agreed").
class RequestTrack {
public:
    static constexpr std::int16_t kNone = -1;  // a cycle that verified no cache draft

    // space: scope of the outcomes that it shares with other requests. teaches: its own outcomes count there.
    RequestTrack(int window, std::span<const std::int32_t> prompt, const TokenFlags& flags,
                 std::uint64_t space, bool teaches)
        : history_(static_cast<std::size_t>(window), kNone),
          prompt_len_(static_cast<int>(prompt.size())),
          space_(space),
          teaches_(teaches),
          tail_(prompt, flags) {
        append(prompt);
    }

    // Appends tokens that were committed outside a cycle.
    void extend(std::span<const std::int32_t> tokens) {
        generated_len_ += static_cast<int>(tokens.size());
        append(tokens);
        tail_.extend(tokens);
    }

    // Sets the draft that was proposed for the next cycle. place: where in the request's own text its source
    // begins, minus 1; below 0 if the source is elsewhere.
    void expect_draft(std::span<const std::int32_t> draft, std::int64_t place) {
        draft_.assign(draft.begin(), draft.end());
        place_ = place;
    }

    // Ends a cycle. verified: how many first tokens of the draft were verified. of_all: the outcomes that
    // requests share. Returns how many of the verified tokens were accepted; kNone if none was verified.
    int commit(std::span<const std::int32_t> tokens, int verified, TokenOutcomes& of_all) {
        const int num = static_cast<int>(tokens.size()), draft_len = static_cast<int>(draft_.size());
        int num_right = 0;
        while (num_right < std::min(draft_len, num) && draft_[at(num_right)] == tokens[at(num_right)])
            ++num_right;
        const int accepted = verified > 0 ? std::min(num_right, verified) : kNone;
        // The history is about whole drafts. A part that was accepted completely does not tell how right one was.
        const bool is_cut = verified < draft_len && accepted == verified;
        remember(is_cut ? kNone : static_cast<std::int16_t>(std::min(accepted, 32767)));
        const int known_len = std::min(draft_len, kMaxDepth), agreed = std::min(num_right, kMaxDepth);
        for (int i = 0; i < std::min({agreed + 1, known_len, num}); ++i) {
            const std::int32_t before = i > 0 ? draft_[at(i - 1)] : latest_[0];
            outcomes_.add(0, before, draft_[at(i)], i < agreed);
            if (teaches_) of_all.add(space_, before, draft_[at(i)], i < agreed);
        }
        if (num > 0) {
            for (int k = kNumCyclesSeen - 1; k > 0; --k) cycles_[k] = cycles_[k - 1];
            cycles_[0] = {static_cast<float>(agreed), static_cast<float>(num)};
            for (int d = 0; d < kNumDecays; ++d) {
                const float kept = decay(d, num);
                moving_agreed_[d] = moving_agreed_[d] * kept + static_cast<float>(agreed);
                moving_committed_[d] = moving_committed_[d] * kept + static_cast<float>(num);
            }
            num_agreed_ += agreed;
            num_committed_ += num;
            run_ = known_len > 0 && agreed == std::min(known_len, num) ? run_ + num : 0;
        }
        if (known_len > 0 && place_ >= 0 && agreed > 0) {
            expected_place_ = place_ + num;
        } else if (expected_place_ >= 0) {
            expected_place_ += num;
        }
        draft_.clear();
        extend(tokens);
        return accepted;
    }

    // Probabilities for a draft that follows the text, from the outcomes of this request and of all in its space.
    OutcomeProbs probs_right(std::span<const std::int32_t> draft, const TokenOutcomes& of_all) const {
        return {outcomes_.probs<kOutcomeDepth>(0, latest_[0], draft),
                of_all.probs<kOutcomeDepth>(space_, latest_[0], draft)};
    }

    int prompt_len() const { return prompt_len_; }
    int generated_len() const { return generated_len_; }
    std::int32_t latest(int back) const { return latest_[back]; }  // -1 if there is none
    const TextTail& tail() const { return tail_; }
    // Where the source of a copy in progress would continue; below 0 if unknown.
    std::int64_t expected_place() const { return expected_place_; }
    int run() const { return run_; }
    float share() const { return ratio(static_cast<float>(num_agreed_), static_cast<float>(num_committed_)); }
    int num_committed() const { return num_committed_; }
    float moving_share(int d) const { return ratio(moving_agreed_[d], moving_committed_[d]); }
    struct Cycle {
        float agreed = 0, committed = 0;
        float share() const { return ratio(agreed, committed); }
    };
    const Cycle& cycle(int back) const { return cycles_[back]; }

    struct Recent {
        float cache_rate = 0, mean_accepted = 0, last_accepted = 0;
    };
    Recent recent() const {
        const std::size_t num = std::min(num_cycles_, history_.size());
        Recent recent;
        recent.cache_rate = ratio(static_cast<float>(num_cache_), static_cast<float>(num));
        recent.mean_accepted = ratio(static_cast<float>(num_accepted_), static_cast<float>(num_cache_));
        if (num_cache_ > 0) recent.last_accepted = last_accepted_;
        return recent;
    }

private:
    static std::size_t at(int place) { return static_cast<std::size_t>(place); }

    static float ratio(float part, float whole) { return whole > 0 ? part / whole : 0.f; }

    static float decay(int d, int num) {
        static const auto table = [] {
            std::array<std::array<float, kMaxDepth + 2>, kNumDecays> decays;
            for (int i = 0; i < kNumDecays; ++i)
                for (int n = 0; n < kMaxDepth + 2; ++n)
                    decays[i][n] = std::exp2(-static_cast<float>(n) / kHalfLives[i]);
            return decays;
        }();
        return table[d][std::min(num, kMaxDepth + 1)];
    }

    void remember(std::int16_t accepted) {
        std::int16_t& place = history_[num_cycles_ % history_.size()];
        if (num_cycles_ >= history_.size()) count(place, -1);
        place = accepted;
        count(accepted, 1);
        if (accepted != kNone) last_accepted_ = accepted;
        ++num_cycles_;
    }

    void count(std::int16_t accepted, int times) {
        if (accepted == kNone) return;
        num_cache_ += times;
        num_accepted_ += times * accepted;
    }

    void append(std::span<const std::int32_t> tokens) {
        if (tokens.size() >= 2) latest_[1] = tokens[tokens.size() - 2];
        if (tokens.size() == 1) latest_[1] = latest_[0];
        if (!tokens.empty()) latest_[0] = tokens.back();
    }

    std::vector<std::int16_t> history_;  // a ring
    std::size_t num_cycles_ = 0;
    int num_cache_ = 0, num_accepted_ = 0;  // sums over history_
    float last_accepted_ = 0;
    int prompt_len_;
    std::uint64_t space_;
    bool teaches_;
    TextTail tail_;
    TokenOutcomes outcomes_{1 << 10};
    int generated_len_ = 0;
    std::array<std::int32_t, 2> latest_ = {-1, -1};
    std::array<Cycle, kNumCyclesSeen> cycles_{};
    std::array<float, kNumDecays> moving_agreed_{}, moving_committed_{};
    int num_agreed_ = 0, num_committed_ = 0, run_ = 0;
    std::vector<std::int32_t> draft_;
    std::int64_t place_ = -1, expected_place_ = -1;
};

}  // namespace sglang_hvd
