// Computes the predictor's inputs. features.py has their names, order and definitions.
#pragma once

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "draft_layout.hpp"
#include "request_track.hpp"
#include "text_tail.hpp"
#include "token_flags.hpp"
#include "vector_math.hpp"

namespace sglang_hvd {

constexpr std::array<int, 9> kProbDepths = {1, 2, 3, 4, 6, 8, 12, 16, 24};
constexpr std::array<int, 4> kVotesDepths = {1, 3, 10, 16};
constexpr int kWorthLen = 6;  // WORTH_LEN of config.py
constexpr int kNumDraftFeatures = 14 + 9 + 1 + 9 + 20 + kNumCyclesSeen + kNumDecays + 7 + 6 + 2 + 8 +
                                  static_cast<int>(TextTail::kNumMarks + kMarks.size()) + 3 +
                                  kNumClasses + 2 * kEvidenceDepth +
                                  5 * kNumClasses;
constexpr int kNumPositionFeatures = 4 + 2 * kNumClasses;
static_assert(kMaxDepth % kMaxLanes == 0, "whole vectors of tokens are read and written");
static_assert(kMaxDepth <= 255, "a byte counts the tokens of a class");

struct DraftRow {
    std::span<const std::int32_t> token_ids;
    std::span<const float> probs;
    Match match;
    DraftEvidence evidence;

    int size() const { return static_cast<int>(token_ids.size()); }
};

class FeatureWriter {
    static constexpr int kMaxLogs = 32;  // room for each kind

public:
    // of_all: outcomes that requests share.
    FeatureWriter(const TokenFlags& classes, const TokenOutcomes& of_all)
        : classes_(classes), of_all_(of_all) {}

    // draft: what is predicted for. votes: the draft that the votes propose; in cache mode votes the same one.
    // positions: row-major [kNumPositionFeatures, kMaxDepth].
    void write(const RequestTrack& track, const DraftRow& draft, const DraftRow& votes,
               std::int64_t place, float* features, float* positions) {
        out_ = features_ = features;
        num_logs_ = num_logits_ = 0;
        const int num = draft.size();
        Flags flags;
        flags[0] = classes_.of(track.latest(0));
        std::uint64_t counts = 0;
        FirstPlaces first;
        for (int i = 0; i < num; ++i) {
            flags[i + 1] = classes_.of(draft.token_ids[i]);
            counts += spread_of(flags[i + 1]);
            first.add(flags[i + 1], i);
        }
        std::fill(flags.begin() + num + 1, flags.end(), std::uint8_t{0});
        const auto length = static_cast<float>(num);
        const Match& match = draft.match;

        // The paper's features.
        const auto prompt_len = static_cast<float>(track.prompt_len());
        const auto generated_len = static_cast<float>(track.generated_len());
        const auto recent = track.recent();
        put(match.score);
        put(match.match_len);
        put(length);
        put_log(prompt_len);
        put_log(generated_len);
        put(generated_len / std::max(1.f, prompt_len + generated_len));
        put(recent.cache_rate);
        put(recent.mean_accepted);
        put(recent.last_accepted);
        for (int c = 0; c < kNumPaperClasses; ++c)
            put(static_cast<float>(count_of(counts, c)) / length);

        // The draft's own probabilities.
        for (const int depth : kProbDepths) put_logit(prob_at(draft, depth));
        put(sum_of(draft.probs.first(static_cast<std::size_t>(std::min(num, kWorthLen)))));

        put_match(match);

        // What the votes propose.
        const bool is_same = votes.token_ids.data() == draft.token_ids.data() &&
                             votes.probs.data() == draft.probs.data();
        const int common = std::min(num, votes.size());
        int agreeing = is_same ? common : 0;
        while (agreeing < common && draft.token_ids[agreeing] == votes.token_ids[agreeing]) ++agreeing;
        put_log(static_cast<float>(agreeing));
        put(static_cast<float>(agreeing) / length);
        put(agreeing == num ? 1.f : 0.f);
        put_logit(agreeing > 0 ? votes.probs[agreeing - 1] : 0.f);
        put_logit(agreeing >= kWorthLen ? votes.probs[kWorthLen - 1] : 0.f);
        put(sum_of(votes.probs.first(static_cast<std::size_t>(agreeing))));
        put(votes.match.score);
        for (const int depth : kVotesDepths) put_logit(prob_at(votes, depth));
        put_match(votes.match);

        // How right the cache was lately.
        for (int k = 0; k < kNumCyclesSeen; ++k) put(track.cycle(k).share());
        for (int d = 0; d < kNumDecays; ++d) put(track.moving_share(d));
        put(track.share());
        put_log(static_cast<float>(track.num_committed()));
        put(track.cycle(0).agreed);
        put(track.cycle(1).agreed);
        put(track.cycle(0).committed);
        put(track.cycle(1).committed);
        put_log(static_cast<float>(track.run()));

        // Whether a copy continues.
        const bool is_known = place >= 0 && track.expected_place() >= 0;
        const auto shift = is_known ? static_cast<float>(place - track.expected_place()) : 0.f;
        const float distance = std::abs(shift);
        put(is_known ? 1.f : 0.f);
        put(is_known && distance == 0 ? 1.f : 0.f);
        put(is_known && distance <= 3 ? 1.f : 0.f);
        put(shift > 0 && shift < 64 ? 1.f : 0.f);
        put(shift < 0 && shift > -64 ? 1.f : 0.f);
        put_log(distance);
        float* const shift_at = out_ - 1;

        // The texts before draft and source.
        put(votes.evidence.aligned);
        put(votes.evidence.in_common);

        // How often drafts had its tokens right.
        const OutcomeProbs right = track.probs_right(draft.token_ids, of_all_);
        put_right(right.of_own, std::min(num, kOutcomeDepth));
        put_right(right.of_all, std::min(num, kOutcomeDepth));

        // Where in its line the draft begins, the latest output, and where the draft has its first marks.
        const TextTail& tail = track.tail();
        for (std::size_t m = 0; m < TextTail::kNumMarks; ++m) put_log(static_cast<float>(tail.since(m)));
        const float beyond = match.match_len - static_cast<float>(tail.since(kLineBreakMark));
        put(beyond >= 0 ? 1.f : 0.f);
        put(beyond > 0 ? 1.f : 0.f);
        put_log(std::max(beyond, 0.f));
        for (int c = 0; c < kNumClasses; ++c) put(tail.share(c));
        for (const float place : first.places()) put_log(place);

        // What else has votes where the draft begins.
        for (const float prob : votes.evidence.other) put_logit(prob);
        for (const float num_others : votes.evidence.num_others) put_log(num_others);

        // The tokens where the draft begins.
        put_classes(classes_.of(track.latest(1)));
        put_classes(flags[0]);
        for (int i = 0; i < 3; ++i) put_classes(i < num ? flags[i + 1] : std::uint8_t{0});

        transform(logs_.data(), num_logs_, logits_.data(), num_logits_, features);
        *shift_at = std::copysign(*shift_at, shift);
        write_positions(draft, votes, is_same, agreeing, flags, positions);
    }

private:
    // Classes of the token before the draft and of the draft's tokens, padded with 0.
    using Flags = std::array<std::uint8_t, kMaxDepth + 1>;

    // Where a draft has each mark first; 2 * kMaxDepth if it has none.
    class FirstPlaces {
    public:
        FirstPlaces() { places_.fill(2 * kMaxDepth); }

        void add(std::uint8_t flags, int place) {
            if ((flags & ~seen_) == 0) return;
            for (std::size_t m = 0; m < kMarks.size(); ++m)
                if ((flags & kMarks[m]) && !(seen_ & kMarks[m])) places_[m] = static_cast<float>(place);
            seen_ |= flags;
        }

        const std::array<float, kMarks.size()>& places() const { return places_; }

    private:
        std::array<float, kMarks.size()> places_;
        std::uint8_t seen_ = 0;
    };

    void put(float value) { *out_++ = value; }

    // Puts a value whose ln(1 + value), or whose log odds, transform() computes for all features at once.
    void put_log(float value) {
        assert(num_logs_ < kMaxLogs);
        logs_[num_logs_++] = static_cast<std::uint8_t>(out_ - features_);
        put(value);
    }
    void put_logit(float prob) {
        assert(num_logits_ < kMaxLogs);
        logits_[num_logits_++] = static_cast<std::uint8_t>(out_ - features_);
        put(prob);
    }

    static void transform(const std::uint8_t* logs, int num_logs, const std::uint8_t* logits,
                          int num_logits, float* features) {
        alignas(64) float values[2 * kMaxLogs] = {};
        float* const odds = values + kMaxLogs;
        for (int i = 0; i < num_logs; ++i) values[i] = features[logs[i]];
        for (int i = 0; i < num_logits; ++i) odds[i] = features[logits[i]];
        in_lanes([&]<int kLanes>() __attribute__((always_inline)) {
            using F = Floats<kLanes>;
            for (int i = 0; i < num_logs; i += kLanes)
                store(log_of(1.f + load<F>(values + i)), values + i);
            for (int i = 0; i < num_logits; i += kLanes)
                store(logit_of(load<F>(odds + i)), odds + i);
        });
        for (int i = 0; i < num_logs; ++i) features[logs[i]] = values[i];
        for (int i = 0; i < num_logits; ++i) features[logits[i]] = odds[i];
    }

    void put_match(const Match& match) {
        put(match.is_from(MatchOrigin::kPrompt) ? 1.f : 0.f);
        put(match.is_from(MatchOrigin::kOutput) ? 1.f : 0.f);
        put_log(match.match_len);
        put_log(match.age);
        put_log(match.num_occurrences);
        put_log(match.num_agreeing);
        put(match.num_agreeing / std::max(1.f, match.num_occurrences));
        put(match.agreement);
        put(match.mean_agreement);
    }

    // Log odds of the products of the first one, three and six probabilities, and of their minimum.
    void put_right(const std::array<float, kOutcomeDepth>& probs, int num) {
        float product = 1, lowest = 1;
        std::array<float, kOutcomeDepth> products;
        for (std::size_t i = 0; i < products.size(); ++i) {
            if (static_cast<int>(i) < num) {
                product *= probs[i];
                lowest = std::min(lowest, probs[i]);
            }
            products[i] = product;
        }
        put_logit(products[0]);
        put_logit(products[2]);
        put_logit(products[5]);
        put_logit(lowest);
    }

    void put_classes(std::uint8_t flags) {
        put_flags(flags, out_);
        out_ += kNumClasses;
    }

    static void put_flags(std::uint8_t flags, float* out) {
        static constexpr auto table = [] {
            std::array<std::array<float, kNumClasses>, 256> rows{};
            for (int f = 0; f < 256; ++f)
                for (int c = 0; c < kNumClasses; ++c) rows[f][c] = static_cast<float>(f >> c & 1);
            return rows;
        }();
        std::memcpy(out, table[flags].data(), sizeof(table[flags]));
    }

    // Four independent sums, since each addition to a single one would wait for the one before.
    static float sum_of(std::span<const float> values) {
        using F = Floats<4>;
        F sums{};
        float rest = 0;
        std::size_t i = 0;
        for (; i + 4 <= values.size(); i += 4) sums += load<F>(values.data() + i);
        for (; i < values.size(); ++i) rest += values[i];
        return sums[0] + sums[1] + (sums[2] + sums[3]) + rest;
    }

    static float prob_at(const DraftRow& draft, int depth) {
        return depth <= draft.size() ? draft.probs[static_cast<std::size_t>(depth) - 1] : 0.f;
    }

    // Log odds, divided by four and clamped, that each of num tokens is accepted if those before it are.
    // given: num_given probabilities that all tokens so far are accepted. The other tokens have kUnknown.
    static constexpr float kUnknown = -1.5f;
    static void write_odds(const float* given, int num_given, int num, float* out) {
        alignas(64) float before[kMaxDepth], now[kMaxDepth];
        // Whole vectors are read.
        const int num_padded = (num + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
        std::copy_n(given, num_given, now);
        std::fill(now + num_given, now + num_padded, 0.f);  // becomes kUnknown
        std::fill(before, before + num_padded, 1.f);
        for (int i = 1; i < num_given; ++i) before[i] = given[i - 1];
        in_lanes([&]<int kLanes>() __attribute__((always_inline)) {
            using F = Floats<kLanes>;
            for (int i = 0; i < num; i += kLanes) {
                const F steps = load<F>(now + i) / clamp_of(load<F>(before + i), 1e-9f, 1.f);
                store(clamp_of(logit_of(steps), 4 * kUnknown, -4 * kUnknown) * 0.25f, out + i);
            }
        });
    }

    // Entries after the last token are unspecified: whole vectors are read and written.
    static void write_positions(const DraftRow& draft, const DraftRow& votes, bool is_same,
                                int agreeing, const Flags& flags, float* out) {
        const int num = draft.size();
        write_odds(draft.probs.data(), num, num, out);
        if (is_same && agreeing == num)
            std::copy(out, out + num, out + kMaxDepth);
        else
            write_odds(votes.probs.data(), agreeing, num, out + kMaxDepth);
        write_evidence(draft.evidence, num, out + 2 * kMaxDepth);
        write_classes(flags.data(), num, out + 4 * kMaxDepth);
    }

    // Log odds, divided by four, that a token follows the two before it, from how often it did; and how long
    // ago the text had the token.
    static void write_evidence(const DraftEvidence& evidence, int num, float* out) {
        static_assert(2 * kEvidenceDepth <= kMaxLanes);
        alignas(64) float values[kMaxLanes];
        std::fill(values, values + kMaxLanes, 1.f);
        for (int i = 0; i < kEvidenceDepth; ++i) {
            const auto at = static_cast<std::size_t>(i);
            values[i] = odds_of(evidence.num_followed[at], evidence.num_seen[at]);
            values[kEvidenceDepth + i] = 1.f + evidence.age[at];
        }
        in_lanes([&]<int kLanes>() __attribute__((always_inline)) {
            for (int i = 0; i < 2 * kEvidenceDepth; i += kLanes)
                store(log_of(load<Floats<kLanes>>(values + i)), values + i);
        });
        std::fill(out, out + num, 0.f);
        std::fill(out + kMaxDepth, out + kMaxDepth + num, 0.f);
        for (int i = 0; i < std::min(num, kEvidenceDepth); ++i) {
            out[i] = values[i] * 0.25f;
            out[kMaxDepth + i] = values[kEvidenceDepth + i] * 0.1f;
        }
    }

    static float odds_of(float num_followed, float num_seen) {
        constexpr float kUnseen = 0.3f;
        return (num_followed + kUnseen) / (num_seen - num_followed + kUnseen);
    }

    // flags: the first entry is that of the token before the draft.
    static void write_classes(const std::uint8_t* flags, int num, float* out) {
        in_lanes([=]<int kLanes>() __attribute__((always_inline)) {
            for (int i = 0; i < num; i += kLanes) {
                const auto before = widened<kLanes>(flags + i), now = widened<kLanes>(flags + i + 1);
                for (int c = 0; c < kNumClasses; ++c)
                    store(bit_of<kLanes>(now, c), out + c * kMaxDepth + i);
                for (int c = 0; c < kNumClasses; ++c)
                    store(bit_of<kLanes>(before, c), out + (kNumClasses + c) * kMaxDepth + i);
            }
        });
    }
    template <int kLanes>
    [[gnu::always_inline]] static Ints<kLanes> widened(const std::uint8_t* bytes) {
        typename Vector<kLanes>::Bytes lanes;
        std::memcpy(&lanes, bytes, sizeof(lanes));
        return __builtin_convertvector(lanes, Ints<kLanes>);
    }
    template <int kLanes>
    [[gnu::always_inline]] static Floats<kLanes> bit_of(Ints<kLanes> flags, int bit) {
        return __builtin_convertvector(flags >> bit & 1, Floats<kLanes>);
    }

    const TokenFlags& classes_;
    const TokenOutcomes& of_all_;
    float *features_ = nullptr, *out_ = nullptr;
    std::array<std::uint8_t, kMaxLogs> logs_, logits_;  // indices of features
    int num_logs_ = 0, num_logits_ = 0;
};

}  // namespace sglang_hvd
