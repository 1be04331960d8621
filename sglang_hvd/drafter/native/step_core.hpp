// A decode step of a batch: the suffix cache, the predictors and the allocator one after the other, and what each
// request verifies until its cycle is committed. tests/drafter/step_oracle.py does the same in Python.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "allocate.hpp"
#include "cache_core.hpp"
#include "calibration.hpp"
#include "draft_layout.hpp"
#include "host_trees.hpp"
#include "model_predictor.hpp"
#include "network.hpp"
#include "predictions.hpp"
#include "rule.hpp"
#include "step_allocator.hpp"
#include "tracker.hpp"

namespace sglang_hvd {

// What a step is decided from; see StepArrays in proposer.py. Row i belongs to request i of the batch.
struct StepArrays {
    DraftRows drafts, votes, branches;
    std::int32_t* draft_lens = nullptr;
    float *features = nullptr, *positions = nullptr;
    float *accepted_lens = nullptr, *acceptance = nullptr, *tree_acceptance = nullptr;
    float *model_lens = nullptr, *model_probs = nullptr, *model_probs_if_right = nullptr;
    std::size_t num_sizes = 0, num_steps = 0;  // of model_probs: [requests][num_sizes][num_steps]
    TreeRows trees;
};

// The requests of a step: their slots in the suffix cache, and those by which everything else knows them.
struct StepSlots {
    std::span<const std::int32_t> of_cache, of_rest;

    std::size_t size() const { return of_cache.size(); }
};

// A drafter on the device. bit: of the source, as in SourceTable. sizes, odds: see model_predictor.py.
struct DeviceSource {
    ModelPredictor* predictor;
    std::uint8_t bit;
    std::vector<std::int32_t> sizes;
    std::vector<double> odds;
};

// What a request verifies; see DraftPlans in types.py. drafter: bit of the source on the device.
struct PlannedCycle {
    std::uint8_t host_sources = 0, drafter = 0;
    std::int32_t num_host = 0, num_model = 0, model_size = 0, model_steps = 0, chain_len = 0;
    float chain_predicted = 0, model_predicted = 0;

    std::size_t sources() const { return host_sources | (num_model > 0 ? drafter : std::uint8_t{0}); }
};

// What each request verifies. The first StepDrafts are those of the allocator. tokens, parents: [requests][row].
struct StepChoice {
    StepDrafts drafts;
    std::span<std::int32_t> chain_lens;
    std::span<float> chain_predicted;
    std::span<bool> are_trees;
    std::span<std::uint8_t> host_sources;
    std::int32_t *tokens, *parents;
    std::size_t row;
};

// Of all requests of a step. drafter: bit of the source on the device. max_host: the largest number of host nodes.
struct ChosenShape {
    std::uint8_t drafter = 0;
    std::int32_t num_steps = 0, max_host = 0;
};

// The costs of a step. of_batch: null under policies by rule. context: milliseconds for 1,000 tokens in the KV caches.
// next_waits: see StepAllocator.
struct StepPrices {
    const BatchCosts* of_batch = nullptr;
    double context = 0;
    bool next_waits = false;
};

// The committed tokens of a step: the first lengths[i] of row i. The numbers are those of VerifyOutcomes.
struct Committed {
    const std::int32_t* tokens;
    std::size_t width;
    std::span<const std::int32_t> lengths, num_accepted, num_model_accepted;

    std::span<const std::int32_t> of(std::size_t row) const {
        return {tokens + row * width, static_cast<std::size_t>(lengths[row])};
    }
};

// Counts of one request, or of all; cycles and accepted drafts by set of sources.
struct CycleCounts {
    std::vector<std::int64_t> num_cycles, num_accepted;
    std::int64_t num_target_tokens = 0;

    static CycleCounts of(std::size_t num_sets) {
        const std::vector<std::int64_t> none(num_sets, 0);
        return {none, none};
    }

    // A cycle that committed so many tokens, accepted drafts included.
    void add(std::size_t sources, std::int32_t accepted, std::int32_t num_tokens) {
        ++num_cycles[sources];
        num_accepted[sources] += accepted;
        num_target_tokens += num_tokens - accepted;
    }
};

class StepCore {
public:
    using Ints = std::span<const std::int32_t>;
    using Seconds = std::array<double, 3>;  // to propose, to compute features, to predict

    // tracker: null where no features are computed. allocator: null under policies that do not weigh costs, which
    // decide by the rule. num_sets: sets of sources. cache_bit: the suffix cache as a source. asks_votes: the
    // features also need the drafts of the votes.
    StepCore(CacheCore& cache, Tracker* tracker, std::vector<DeviceSource> models, StepAllocator* allocator,
             std::optional<Rule> rule, std::size_t num_sets, std::uint8_t cache_bit, bool asks_votes)
        : cache_(cache),
          tracker_(tracker),
          models_(std::move(models)),
          allocator_(allocator),
          rule_(std::move(rule)),
          num_sets_(num_sets),
          of_all_(CycleCounts::of(num_sets)),
          cache_bit_(cache_bit),
          asks_votes_(asks_votes) {
        if ((allocator_ == nullptr) != rule_.has_value())
            throw std::invalid_argument("a policy decides either by costs or by a rule");
    }

    // is_survival: the kind of the predictor. calibration: null if it is not corrected.
    void use_predictor(Network* network, bool is_survival, Calibration* calibration) {
        network_ = network;
        is_survival_ = is_survival;
        calibration_ = calibration;
    }

    // A new request has this slot in the cache.
    void start(std::int32_t slot, std::int64_t num_tokens) {
        Request& request = at_slot(requests_, slot);
        request = {};
        request.num_tokens = num_tokens;
        request.counts = CycleCounts::of(num_sets_);
    }

    // Tokens committed outside of a cycle.
    void extend(std::int32_t slot, std::int64_t num_tokens, bool counts) {
        of(slot).num_tokens += num_tokens;
        if (!counts) return;
        of(slot).counts.num_target_tokens += num_tokens;
        of_all_.num_target_tokens += num_tokens;
    }

    bool is_by_costs() const { return allocator_ != nullptr; }

    // Whether the slot of the cache belongs to an active request that was started here.
    bool has(std::int32_t slot) const {
        return cache_.has(slot) && static_cast<std::size_t>(slot) < requests_.size();
    }

    // Throws std::invalid_argument if a slot belongs to no active request.
    void require_active(const StepSlots& slots) const {
        for (const auto slot : slots.of_cache)
            if (!has(slot)) throw std::invalid_argument("a slot was not started, or its request has finished");
        for (const auto slot : slots.of_rest) {
            if (tracker_ != nullptr) tracker_->at(slot);
            bool is_known = allocator_ == nullptr || allocator_->pace().has(slot);
            for (const DeviceSource& model : models_) is_known = is_known && model.predictor->has(slot);
            if (!is_known) throw std::invalid_argument("slot " + std::to_string(slot) + " was not started");
        }
    }

    std::int64_t num_tokens(std::int32_t slot) const { return of(slot).num_tokens; }
    void write_lengths(Ints slots, std::span<std::int64_t> out) const {
        for (std::size_t i = 0; i < slots.size(); ++i) out[i] = num_tokens(slots[i]);
    }
    const CycleCounts& counts(std::int32_t slot) const { return of(slot).counts; }
    const CycleCounts& counts_of_all() const { return of_all_; }
    bool is_planned(std::int32_t slot) const { return of(slot).is_planned; }

    // Cache drafts, their features, and what is predicted of them and of the drafts of the device.
    // max_chain: the longest draft. max_branch: nodes of a draft that may branch; absent: none does.
    Seconds propose(const StepSlots& slots, const AskedLimits& asked, std::int32_t max_chain,
                    std::optional<std::int32_t> max_branch, const StepArrays& out) {
        const std::size_t num = slots.size();
        const auto began = Clock::now();
        const bool is_read = tracker_ != nullptr;
        max_nodes_.resize(num);
        for (std::size_t i = 0; i < num; ++i) max_nodes_[i] = asked.max_chain(i, max_chain);
        cache_.propose(slots.of_cache, DraftShape::kChain, false, is_read, max_nodes_, out.drafts);
        if (asks_votes_) cache_.propose(slots.of_cache, DraftShape::kChain, true, is_read, max_nodes_, out.votes);
        if (max_branch) {
            for (std::size_t i = 0; i < num; ++i) max_nodes_[i] = asked.max_branch(i, *max_branch);
            cache_.propose(slots.of_cache, DraftShape::kTree, false, false, max_nodes_, out.branches);
        }
        const auto proposed = Clock::now();
        if (!is_read) return {seconds(began, proposed), 0, 0};
        tracker_->write(slots.of_rest, out.drafts, asks_votes_ ? out.votes : out.drafts, out.features, out.positions);
        for (std::size_t i = 0; i < num; ++i) out.draft_lens[i] = std::min(out.drafts.num_nodes[i], kMaxDepth);
        const auto described = Clock::now();
        if (network_ != nullptr) predict(slots.of_rest, out);
        return {seconds(began, proposed), seconds(proposed, described), seconds(described, Clock::now())};
    }

    // The policy decides what each request verifies, and its cycle begins.
    ChosenShape choose(const StepSlots& slots, const AskedLimits& asked, const StepArrays& arrays,
                       const StepPrices& prices, const StepChoice& out) {
        return is_by_costs() ? by_costs(slots, asked, arrays, prices, out) : by_rule(slots, asked, arrays, out);
    }

    // In place of choose for a step that was launched without drafts; see StepAllocator. By costs only.
    bool wants_drafts(const StepSlots& slots, const AskedLimits& asked, const StepArrays& arrays,
                      const StepPrices& prices) {
        for (const auto slot : slots.of_cache) begin(slot, {});
        const BatchCosts costs = with_context(slots, prices);
        const RowLimits limits = fixed(asked, arrays, costs, slots.size());
        return allocator_->wants_drafts(slots.of_rest, limits, prediction(slots, arrays), costs);
    }

    // Commits what the planned cycles gave. teaches: by request, whether the predictors learn from it; empty:
    // they learn from all. Returns the fallbacks that changed. If it throws std::invalid_argument, nothing has
    // changed.
    std::vector<FallbackChange> commit(const StepSlots& slots, std::span<const bool> teaches,
                                       const Committed& committed) {
        const std::size_t num = slots.size();
        require_active(slots);
        for (std::size_t i = 0; i < num; ++i) {
            const auto num_tokens = committed.lengths[i], accepted = committed.num_accepted[i];
            if (accepted < 0 || num_tokens < accepted || num_tokens > accepted + 1)
                throw std::invalid_argument("a cycle commits its accepted drafts and at most one bonus token, got " +
                                            std::to_string(num_tokens) + " tokens with " + std::to_string(accepted) +
                                            " accepted drafts");
        }
        cache_.commit(slots.of_cache, committed.tokens, committed.width, committed.lengths);
        std::vector<FallbackChange> changes;
        if (tracker_ != nullptr) changes = observe(slots, teaches, committed);
        for (std::size_t i = 0; i < num; ++i) {
            Request& request = of(slots.of_cache[i]);
            for (CycleCounts* const counts : {&request.counts, &of_all_})
                counts->add(request.cycle.sources(), committed.num_accepted[i], committed.lengths[i]);
            request.num_tokens += committed.lengths[i];
            request.is_planned = false;
        }
        return changes;
    }

private:
    using Clock = std::chrono::steady_clock;

    struct Request {
        std::int64_t num_tokens = 0;
        CycleCounts counts;
        PlannedCycle cycle;
        bool is_planned = false;
    };

    static double seconds(Clock::time_point from, Clock::time_point to) {
        return std::chrono::duration<double>(to - from).count();
    }

    static void write_row(Ints from, std::int32_t* to, std::size_t width) {
        std::fill(std::copy(from.begin(), from.end(), to), to + width, 0);
    }

    // The drafts that make most progress in their time.
    ChosenShape by_costs(const StepSlots& slots, const AskedLimits& asked, const StepArrays& arrays,
                         const StepPrices& prices, const StepChoice& out) {
        const BatchCosts costs = with_context(slots, prices);
        const RowLimits limits = fixed(asked, arrays, costs, slots.size());
        const StepShape shape = allocator_->allocate(slots.of_rest, limits, prediction(slots, arrays), costs,
                                                     prices.next_waits, out.drafts);
        const Round& round = costs.rounds[shape.round];
        const std::uint8_t drafter = models_[static_cast<std::size_t>(round.drafter)].bit;
        const auto width = static_cast<std::size_t>(shape.max_host);
        for (std::size_t i = 0; i < slots.size(); ++i) {
            const auto taken = static_cast<std::size_t>(out.drafts.num_host[i]);
            const TreeRow tree = arrays.trees.row(i);
            const PartOfTree part =
                measure(tree.is_chain.first(taken), tree.sources.first(taken), arrays.acceptance + i * kMaxDepth,
                        arrays.drafts.length(i));
            out.are_trees[i] = part.is_tree;
            out.host_sources[i] = part.sources;
            out.chain_lens[i] = static_cast<std::int32_t>(part.chain_len);
            out.chain_predicted[i] = static_cast<float>(part.chain_predicted);
            write_row(tree.tokens.first(taken), out.tokens + i * out.row, width);
            write_row(tree.parents.first(taken), out.parents + i * out.row, width);
            begin(slots.of_cache[i], out, i, drafter, round.num_steps);
        }
        return {drafter, round.num_steps, shape.max_host};
    }

    // Request by request. What is predicted of whole drafts is kept by who predicted it, so NaN stands here.
    ChosenShape by_rule(const StepSlots& slots, const AskedLimits& asked, const StepArrays& arrays,
                        const StepChoice& out) {
        const std::size_t num = slots.size();
        std::int32_t max_host = 0;
        for (std::size_t i = 0; i < num; ++i) {
            const Match match = arrays.drafts.match(i);
            const bool has_draft = arrays.drafts.num_nodes[i] > 0;
            const bool is_fallback = has_draft && calibration_ != nullptr &&
                                     calibration_->of(static_cast<int>(match.origin)).is_fallback();
            const auto [num_host, num_model] = rule_->choose(
                i, asked,
                {arrays.drafts.num_nodes[i], match.score, arrays.accepted_lens[i], arrays.model_lens[i],
                 is_survival_ ? arrays.acceptance + i * kMaxDepth : nullptr, is_fallback});
            max_host = std::max(max_host, num_host);
            out.drafts.num_host[i] = out.chain_lens[i] = num_host;
            out.drafts.num_model[i] = out.drafts.model_size[i] = num_model;
            out.drafts.model_predicted[i] = out.chain_predicted[i] = std::numeric_limits<float>::quiet_NaN();
            out.are_trees[i] = false;
            out.host_sources[i] = num_host > 0 ? cache_bit_ : std::uint8_t{0};
            begin(slots.of_cache[i], out, i, rule_->drafter(), rule_->num_steps());
        }
        const auto width = static_cast<std::size_t>(max_host);
        for (std::size_t i = 0; i < num; ++i) {
            const auto taken = static_cast<std::size_t>(out.drafts.num_host[i]);
            write_row(arrays.drafts.tokens(i).first(taken), out.tokens + i * out.row, width);
            std::iota(out.parents + i * out.row, out.parents + i * out.row + width, -1);
        }
        return {rule_->drafter(), rule_->num_steps(), max_host};
    }

    void begin(std::int32_t slot, const PlannedCycle& cycle) {
        of(slot).cycle = cycle;
        of(slot).is_planned = true;
    }

    // The cycle of request i of a choice begins.
    void begin(std::int32_t slot, const StepChoice& chosen, std::size_t i, std::uint8_t drafter,
               std::int32_t num_steps) {
        const StepDrafts& drafts = chosen.drafts;
        begin(slot, {chosen.host_sources[i], drafter, drafts.num_host[i], drafts.num_model[i], drafts.model_size[i],
                     num_steps, chosen.chain_lens[i], chosen.chain_predicted[i], drafts.model_predicted[i]});
    }

    // The limits as the allocator takes them. Fixed drafts are those of the model drafter first.
    RowLimits fixed(const AskedLimits& asked, const StepArrays& arrays, const BatchCosts& costs, std::size_t num) {
        if (asked.max_tokens.empty()) return {};
        const std::int32_t whole = allocator_->largest_size(0), room = costs.widths.back() - 1;
        if (whole > room) throw std::invalid_argument("the widest verification has no room for the largest draft");
        fixed_host_.resize(num);
        fixed_model_.resize(num);
        for (std::size_t i = 0; i < num; ++i) {
            const std::int32_t max = asked.max_tokens[i];
            fixed_model_[i] = asked.take_model[i] ? std::min(max, whole) : 0;
            const std::int32_t left = std::min(max, room) - fixed_model_[i];
            fixed_host_[i] = asked.take_cache[i] ? std::min(arrays.trees.num_nodes[i], left) : 0;
        }
        return {asked.are_fixed, fixed_host_, fixed_model_, asked.max_tokens};
    }

    Request& of(std::int32_t slot) { return requests_[static_cast<std::size_t>(slot)]; }
    const Request& of(std::int32_t slot) const { return requests_[static_cast<std::size_t>(slot)]; }

    void predict(Ints slots, const StepArrays& out) {
        const std::size_t num = slots.size();
        float* acceptance = is_survival_ ? out.acceptance : nullptr;
        if (is_survival_) {
            predict_acceptance(*network_, out.features, kNumDraftFeatures, out.positions, {out.draft_lens, num},
                               out.accepted_lens, acceptance);
        } else {
            predict_lens(*network_, out.features, kNumDraftFeatures, {out.accepted_lens, num});
        }
        if (calibration_ != nullptr) correct_all(*calibration_, slots, out.drafts, out.accepted_lens, acceptance);
        if (!is_by_costs()) {
            predict_model(*models_.front().predictor, slots, out.drafts, acceptance, out.model_lens);
            return;
        }
        write_tree_acceptance(num, out);
        std::size_t first = 0;
        for (const DeviceSource& model : models_) {
            predict_model(*model.predictor, slots, out.drafts, out.tree_acceptance, out.model_lens);
            predict_model_sizes(*model.predictor, slots, out.drafts, out.tree_acceptance, model.sizes, model.odds,
                                model.predictor->num_steps(),
                                {out.model_probs + first, out.model_probs_if_right + first,
                                 out.num_sizes * out.num_steps, out.num_steps});
            first += model.sizes.size() * out.num_steps;
        }
        for (std::size_t i = 0; i < num; ++i) {
            const ChainDraft chain{out.drafts.tokens(i), out.tree_acceptance + i * kMaxDepth};
            out.trees.num_nodes[i] = static_cast<std::int32_t>(
                joiner_.join(chain, tree_of(out.branches, i), cache_bit_, out.trees.row(i)));
        }
    }

    // The acceptance of chains for the allocator: the predictor's, or the suffix cache's own of origins for which
    // the predictor is in fallback.
    void write_tree_acceptance(std::size_t num, const StepArrays& out) const {
        std::copy_n(out.acceptance, num * kMaxDepth, out.tree_acceptance);
        if (calibration_ == nullptr) return;
        const auto longest = std::min<std::size_t>(out.drafts.width, kMaxDepth);
        for (std::size_t i = 0; i < num; ++i) {
            const std::size_t len = out.drafts.length(i);
            const int origin = len > 0 ? static_cast<int>(out.drafts.match(i).origin) : 0;
            if (!calibration_->of(origin).is_fallback()) continue;
            const float* const probs = out.drafts.probs + i * out.drafts.width;
            for (std::size_t j = 0; j < longest; ++j)
                out.tree_acceptance[i * kMaxDepth + j] = j < len ? probs[j] : 0;
        }
    }

    static BatchPrediction prediction(const StepSlots& slots, const StepArrays& arrays) {
        return {arrays.trees.width, arrays.trees.probs, arrays.trees.depths, {arrays.trees.num_nodes, slots.size()},
                arrays.num_steps,   arrays.model_probs, arrays.model_probs_if_right};
    }

    BatchCosts with_context(const StepSlots& slots, const StepPrices& prices) const {
        std::int64_t num_tokens = 0;
        for (const auto slot : slots.of_cache) num_tokens += of(slot).num_tokens;
        return prices.of_batch->with_context(prices.context * static_cast<double>(num_tokens) / 1000);
    }

    std::vector<FallbackChange> observe(const StepSlots& slots, std::span<const bool> teaches,
                                        const Committed& committed) {
        const std::size_t num = slots.size();
        const auto is_told = [&](std::size_t i) { return teaches.empty() || teaches[i]; };
        chain_accepted_.resize(num);
        for (std::size_t i = 0; i < num; ++i)
            chain_accepted_[i] =
                tracker_->commit(slots.of_rest[i], committed.of(i), of(slots.of_cache[i]).cycle.chain_len);
        for (const DeviceSource& model : models_) {
            for (std::size_t i = 0; i < num; ++i) {
                const PlannedCycle& cycle = of(slots.of_cache[i]).cycle;
                if (!is_told(i) || cycle.num_model == 0 || cycle.drafter != model.bit) continue;
                const auto accepted = cycle.num_host > 0 ? committed.num_model_accepted[i] : committed.num_accepted[i];
                if (accepted < 0) continue;
                model.predictor->observe(slots.of_rest[i], committed.of(i),
                                         {accepted, cycle.model_size, cycle.model_steps, cycle.model_predicted});
            }
        }
        std::vector<FallbackChange> changes;
        for (std::size_t i = 0; calibration_ != nullptr && i < num; ++i) {
            if (!is_told(i)) continue;
            const PlannedCycle& cycle = of(slots.of_cache[i]).cycle;
            std::optional<VerifiedCacheDraft> verified;
            if (cycle.chain_len > 0) verified = {chain_accepted_[i], cycle.chain_len, cycle.chain_predicted};
            if (const auto change = calibration_->observe(slots.of_rest[i], committed.of(i), verified))
                changes.push_back(*change);
        }
        if (allocator_ != nullptr) allocator_->see_tokens(slots.of_rest, committed.lengths);
        return changes;
    }

    CacheCore& cache_;
    Tracker* tracker_;
    std::vector<DeviceSource> models_;
    StepAllocator* allocator_;
    std::optional<Rule> rule_;
    std::size_t num_sets_;
    CycleCounts of_all_;  // all requests so far, ended ones included
    std::uint8_t cache_bit_;
    bool asks_votes_, is_survival_ = false;
    Network* network_ = nullptr;
    Calibration* calibration_ = nullptr;
    TreeJoiner joiner_;
    std::vector<Request> requests_;  // by slot in the cache
    // Kept for their memory.
    std::vector<int> chain_accepted_;
    std::vector<std::int32_t> max_nodes_, fixed_host_, fixed_model_;
};

}  // namespace sglang_hvd
