// The tracks of all active requests, and the features of their drafts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "draft_layout.hpp"
#include "features.hpp"
#include "request_track.hpp"
#include "token_flags.hpp"

namespace sglang_hvd {

// The tracks of the active requests. Computes the features of their drafts.
class Tracker {
    using Ints = std::span<const std::int32_t>;

public:
    Tracker(int window, std::span<const std::uint8_t> classes) : window_(window), classes_(classes) {
        if (window < 1) throw std::invalid_argument("the history window must be at least 1");
    }

    Tracker(const Tracker&) = delete;
    Tracker& operator=(const Tracker&) = delete;

    int start(Ints prompt, const std::string& space, bool teaches) {
        auto track = std::make_unique<RequestTrack>(window_, prompt, classes_, scope_of(space), teaches);
        if (free_.empty()) {
            free_.push_back(static_cast<int>(tracks_.size()));
            tracks_.emplace_back();
        }
        const int slot = free_.back();
        free_.pop_back();
        tracks_[static_cast<std::size_t>(slot)] = std::move(track);
        return slot;
    }

    void finish(int slot) {
        at(slot);
        tracks_[static_cast<std::size_t>(slot)].reset();
        free_.push_back(slot);
    }

    void extend(int slot, Ints tokens) { at(slot).extend(tokens); }

    // Ends the cycle of a request; see RequestTrack::commit.
    int commit(int slot, Ints tokens, int verified_len) { return at(slot).commit(tokens, verified_len, outcomes_); }

    void forget() { outcomes_.clear(); }

    // Writes the features of each draft, and keeps the draft until its cycle ends. Rows without a draft are not
    // written. features: [requests][kNumDraftFeatures]. positions: [requests][kNumPositionFeatures][kMaxDepth].
    void write(Ints slots, const DraftRows& drafts, const DraftRows& votes, float* features, float* positions) {
        for (const int slot : slots) at(slot);
        FeatureWriter writer(classes_, outcomes_);
        for (std::size_t i = 0; i < slots.size(); ++i) {
            RequestTrack& track = at(slots[i]);
            if (drafts.length(i) == 0) {
                track.expect_draft({}, -1);
                continue;
            }
            const DraftRow second = row_of(votes, i);
            const auto place = place_of(track, second);
            writer.write(track, row_of(drafts, i), second, place, features + i * kNumDraftFeatures,
                         positions + i * kNumPositionFeatures * kMaxDepth);
            track.expect_draft(drafts.tokens(i), place);
        }
    }

    // Throws std::invalid_argument if the slot belongs to no active request.
    RequestTrack& at(int slot) {
        const auto place = static_cast<std::size_t>(slot);
        if (slot < 0 || place >= tracks_.size() || !tracks_[place]) {
            throw std::invalid_argument("slot " + std::to_string(slot) + " belongs to no active request");
        }
        return *tracks_[place];
    }

private:
    static DraftRow row_of(const DraftRows& drafts, std::size_t i) {
        const Ints token_ids = drafts.tokens(i).first(std::min<std::size_t>(drafts.length(i), kMaxDepth));
        return {token_ids, drafts.nodes(drafts.probs, i).first(token_ids.size()), drafts.match(i),
                read_row<DraftEvidence>(drafts.evidence + i * kEvidenceColumns)};
    }

    // Where the draft's source is in the request's own text; -1 if it is in finished requests.
    static std::int64_t place_of(const RequestTrack& track, const DraftRow& draft) {
        if (draft.size() == 0 || draft.match.is_from(MatchOrigin::kShared)) return -1;
        const auto length = std::int64_t{track.prompt_len()} + track.generated_len();
        return std::max<std::int64_t>(-1, length - 1 - static_cast<std::int64_t>(draft.match.age));
    }

    // FNV-1a, so that all machines agree; mixed, so that similar names differ in all bits.
    static std::uint64_t scope_of(const std::string& space) {
        std::uint64_t h = 0xCBF29CE484222325u;
        for (const char c : space) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
        h = (h ^ h >> 32) * 0xD6E8FEB86659FD93u;
        return h ^ h >> 32;
    }

    int window_;
    TokenOutcomes outcomes_{1 << 18};
    TokenFlags classes_;
    std::vector<std::unique_ptr<RequestTrack>> tracks_;
    std::vector<int> free_;
};

}  // namespace sglang_hvd
