// The drafts of each step: the search of allocate.hpp at the pace of pace.hpp, requests whose drafts are fixed,
// and exploration: drafts that have not run recently run once in a while, so that what is predicted of them
// cannot go stale.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "allocate.hpp"
#include "pace.hpp"
#include "waits.hpp"
#include "untried.hpp"

namespace sglang_hvd {

// What is predicted of the drafts of a batch; row i belongs to request i.
struct BatchPrediction {
    std::size_t row = 0;                      // entries in a row of probs and depths
    const float* probs = nullptr;             // [requests][row]
    const std::int32_t* depths = nullptr;     // [requests][row]
    std::span<const std::int32_t> num_nodes;  // by request
    std::size_t max_steps = 0;
    const float* model_probs = nullptr;           // [requests][sizes][max_steps]
    const float* model_probs_if_right = nullptr;  // [requests][sizes][max_steps]
};

// By request: see RowLimits in allocator.py. Without values there are no limits.
struct RowLimits {
    std::span<const bool> are_fixed;
    std::span<const std::int32_t> num_host, num_model;  // of those that are fixed
    std::span<const std::int32_t> max_nodes;            // of the others

    bool is_fixed(std::size_t i) const { return !are_fixed.empty() && are_fixed[i]; }
    std::size_t max_of(std::size_t i) const {
        return max_nodes.empty() ? std::numeric_limits<std::size_t>::max() : static_cast<std::size_t>(max_nodes[i]);
    }
};

// By request: see Allocation in allocator.py.
struct StepDrafts {
    std::span<std::int32_t> num_host, num_model, model_size;
    std::span<float> model_predicted;
};

// Places in BatchCosts, and the largest number of host nodes that a request verifies.
struct StepShape {
    std::size_t width = 0, round = 0;
    std::int32_t max_host = 0;
};

class StepAllocator {
public:
    // sizes: of all drafters; the first drafter is the model drafter. merges: see Allocator.
    // look_after: after so many steps without any draft of a kind, one request verifies one. After so many
    // without some round, it runs for all requests that it gains anything for. After so many without some
    // width, a step has it.
    StepAllocator(std::vector<DraftSize> sizes, bool merges, int look_after)
        : sizes_(std::move(sizes)),
          widths_(look_after),
          rounds_(look_after),
          drafters_(look_after, 1),
          host_drafts_(look_after, 1),
          allocator_(merges) {}

    std::span<const DraftSize> sizes() const { return sizes_; }
    Pace& pace() { return pace_; }

    // Size of a drafter's largest draft.
    std::int32_t largest_size(std::int32_t drafter) const {
        std::int32_t largest = 0;
        for (const DraftSize& size : sizes_)
            if (size.drafter == drafter) largest = std::max(largest, size.num_nodes);
        return largest;
    }

    // next_waits: the next step waits for this one's tokens in any case.
    StepShape allocate(std::span<const std::int32_t> slots, const RowLimits& rows,
                       const BatchPrediction& predicted, const BatchCosts& costs, bool next_waits,
                       const StepDrafts& out) {
        const std::size_t num = slots.size();
        if (num == 0) return {};
        gather(slots, rows, predicted);
        Limits limits;
        limits.num_fixed_drafting = num_fixed_drafting_;
        const std::int32_t whole = largest_size(0);
        if (num_fixed_nodes_ > 0) limits.min_width = place_of_width(costs, num_fixed_nodes_);
        if (num_fixed_drafting_ > 0) {
            limits.end_round = end_of_drafter(costs, 0);
            limits.min_round = limits.end_round - 1;
        }
        count_step(num, costs);
        const bool is_off = is_model_off();
        const bool looks_at_round = num_fixed_drafting_ == 0 && is_due_round(is_off);
        if ((is_off || looks_at_round) && !free_.empty()) {
            rounds_.explore();
            limits.must_draft = ++num_model_looks_ % free_.size();
            if (looks_at_round) {
                // For as many requests as draft otherwise, if any: times of as many are compared.
                limits.drafts_are_free = !is_off;
                limits.min_round = rounds_.oldest();
                limits.end_round = limits.min_round + 1;
            }
            limits.min_width = std::max(limits.min_width, place_of_width(costs, room_to_look(costs, limits)));
        }
        const bool is_free = num_fixed_nodes_ == 0 && !limits.must_draft && !free_.empty();
        const std::size_t width_due = is_free ? widths_.due() : 0;
        if (width_due > 0) {
            widths_.explore(width_due);
            limits.min_width = width_due;
            limits.end_width = width_due + 1;
        }
        const Allocation& found = search(num, predicted, costs, limits);
        const Round& round = costs.rounds[found.round];
        const bool ignores_wait = next_waits || !is_free || width_due > 0;
        const bool has_drafts = ignores_wait || waits_.pays(found.gained_ms, found.more_ms, costs.wait);
        std::size_t num_drafting = 0, num_with_host = 0;
        for (std::size_t k = 0; k < free_.size(); ++k) {
            const Choice choice = has_drafts ? found.choices[k] : Choice{};
            write(out, free_[k], choice.num_host, 0, 0, 0);
            num_with_host += choice.num_host > 0;
            if (choice.size < 0) continue;
            ++num_drafting;
            const ModelNodes& model = model_[k * sizes_.size() + static_cast<std::size_t>(choice.size)];
            write(out, free_[k], choice.num_host, num_nodes(model, round), model.num_nodes,
                  predict_model(model, round.num_steps));
        }
        const bool looks_at_host = is_due_at_host(num_with_host) && !limits.must_draft;
        if (looks_at_host) {
            host_drafts_.run(0);
            const std::size_t i = with_draft_[++num_host_looks_ % with_draft_.size()];
            num_drafting -= out.num_model[i] > 0;
            write(out, i, 1, 0, 0, 0);
        }
        if (num_drafting > 0) drafters_.run(0);
        num_drafting += num_fixed_drafting_;
        if (num_drafting > 0) rounds_.run(found.round);
        for (std::size_t i = 0; i < num; ++i)
            if (rows.is_fixed(i))
                write(out, i, rows.num_host[i], rows.num_model[i], rows.num_model[i] > 0 ? whole : 0, 0);
        std::int32_t used = 0, max_host = 0;
        for (std::size_t i = 0; i < num; ++i) {
            used = std::max(used, out.num_host[i] + out.num_model[i]);
            max_host = std::max(max_host, out.num_host[i]);
        }
        // What was found for a width may fit into a narrower one.
        const std::size_t width = place_of_width(costs, used);
        widths_.run(width, is_free && width_due == 0 && !looks_at_host);
        const bool is_weighed = has_drafts && !ignores_wait && used > 0;
        waits_.end_step(is_weighed);
        num_weighed_ = is_weighed ? num : 0;
        ms_price_ = pace_.price(num, costs.step[0]);
        pace_.see_step(costs.step[width] + costs.draft_ms(found.round)[num_drafting] + costs.wait, costs.step[0]);
        return {width, found.round, max_host};
    }

    // Accounts for a step that was launched, without drafts, before its prediction was known. Returns whether
    // drafts would have been worth the wait, or are to be explored: then the next step should not be launched so.
    bool wants_drafts(std::span<const std::int32_t> slots, const RowLimits& rows,
                      const BatchPrediction& predicted, const BatchCosts& costs) {
        const std::size_t num = slots.size();
        if (num == 0) return false;
        gather(slots, rows, predicted);
        count_step(num, costs);
        widths_.run(0, true);
        pace_.see_step(costs.step[0], costs.step[0]);
        waits_.end_step(false);
        // is_due_at_host counts this step; the step that it asks for comes after it.
        const bool looks_at_host = is_due_at_host(0);
        if (num_fixed_nodes_ > 0) return true;
        if (free_.empty()) return false;
        if (looks_at_host || is_model_off() || is_due_round(false)) return true;
        const Allocation& found = search(num, predicted, costs, {});
        return waits_.is_worth_one(found.gained_ms, found.more_ms, costs.wait);
    }

    // The number of tokens that the step committed for each request.
    void see_tokens(std::span<const std::int32_t> slots, std::span<const std::int32_t> num_tokens) {
        if (num_weighed_ > 0 && num_weighed_ == slots.size()) {
            double gained = 0;
            for (std::size_t i = 0; i < slots.size(); ++i)
                gained += pace_.token_value(slots[i]) * (num_tokens[i] - 1);
            waits_.see(gained / ms_price_);
        }
        num_weighed_ = 0;
        pace_.see_tokens(slots, num_tokens);
    }

private:
    void count_step(std::size_t num, const BatchCosts& costs) {
        rounds_.begin(costs.rounds.size());
        drafters_.begin();
        widths_.begin(num, costs.widths.size());
    }

    // The drafts of the requests to allocate for, and what the others verify together.
    void gather(std::span<const std::int32_t> slots, const RowLimits& rows, const BatchPrediction& predicted) {
        host_.clear();
        model_.clear();
        values_.clear();
        free_.clear();
        max_nodes_.clear();
        num_fixed_drafting_ = 0;
        num_fixed_nodes_ = 0;
        for (std::size_t i = 0; i < slots.size(); ++i) {
            if (rows.is_fixed(i)) {
                num_fixed_drafting_ += rows.num_model[i] > 0;
                num_fixed_nodes_ = std::max(num_fixed_nodes_, rows.num_host[i] + rows.num_model[i]);
                continue;
            }
            free_.push_back(i);
            max_nodes_.push_back(rows.max_of(i));
            values_.push_back(pace_.token_value(slots[i]));
            const auto len = std::min(static_cast<std::size_t>(predicted.num_nodes[i]), max_nodes_.back());
            host_.push_back({{predicted.probs + i * predicted.row, len}, {predicted.depths + i * predicted.row, len}});
            for (std::size_t size = 0; size < sizes_.size(); ++size) {
                const std::size_t first = (i * sizes_.size() + size) * predicted.max_steps;
                model_.push_back({sizes_[size].num_nodes, predicted.model_probs + first,
                                  predicted.model_probs_if_right + first});
            }
        }
    }

    const Allocation& search(std::size_t num, const BatchPrediction& predicted, const BatchCosts& costs,
                             const Limits& limits) {
        const Rates rates{values_, pace_.price(num, costs.step[0])};
        return allocator_.allocate({host_, model_, sizes_, predicted.max_steps, max_nodes_}, rates, costs, limits);
    }

    bool is_model_off() const { return drafters_.is_due(0); }

    static void write(const StepDrafts& out, std::size_t i, std::int32_t num_host, std::int32_t num_model,
                      std::int32_t model_size, double model_predicted) {
        out.num_host[i] = num_host;
        out.num_model[i] = num_model;
        out.model_size[i] = model_size;
        out.model_predicted[i] = static_cast<float>(model_predicted);
    }

    // Place of the narrowest width that has room for a root and so many nodes.
    static std::size_t place_of_width(const BatchCosts& costs, std::int32_t num_nodes) {
        const auto found = std::lower_bound(costs.widths.begin(), costs.widths.end(), num_nodes + 1);
        return static_cast<std::size_t>(found - costs.widths.begin());
    }

    // Room for the smallest draft of each drafter whose rounds may be chosen.
    std::int32_t room_to_look(const BatchCosts& costs, const Limits& limits) const {
        const std::size_t end = limits.end_round > 0 ? limits.end_round : costs.rounds.size();
        std::int32_t room = 0;
        for (std::size_t round = limits.min_round; round < end; ++round) {
            // Each drafter's sizes rise: its first is its smallest.
            const auto smallest = std::find_if(sizes_.begin(), sizes_.end(), [&](const DraftSize& size) {
                return size.drafter == costs.rounds[round].drafter;
            });
            room = std::max(room, smallest->num_nodes);
        }
        return room;
    }

    // One past the last round of a drafter.
    static std::size_t end_of_drafter(const BatchCosts& costs, std::int32_t drafter) {
        std::size_t end = costs.rounds.size();
        while (end > 1 && costs.rounds[end - 1].drafter != drafter) --end;
        return end;
    }

    // Whether the round that has not run for longest should run. While no drafter runs this is rarer: the round
    // that gains most is of interest first.
    bool is_due_round(bool is_off) const {
        return rounds_.may_explore() && rounds_.is_due(rounds_.oldest(), is_off ? rounds_.num_options() : 1);
    }

    // Whether the first token of some host draft should be verified, since none was for long.
    bool is_due_at_host(std::size_t num_with_host) {
        if (num_with_host > 0) {
            host_drafts_.run(0);
            return false;
        }
        with_draft_.clear();
        for (std::size_t k = 0; k < free_.size(); ++k)
            if (!host_[k].probs.empty()) with_draft_.push_back(free_[k]);
        if (with_draft_.empty()) return false;
        host_drafts_.begin();
        return host_drafts_.is_due(0);
    }

    std::vector<DraftSize> sizes_;
    UntriedWidths widths_;
    Untried rounds_, drafters_, host_drafts_;
    Allocator allocator_;
    Pace pace_;
    Waits waits_;
    std::size_t num_weighed_ = 0;  // requests of the last step, if its drafts were weighed against a wait
    double ms_price_ = 1;          // of that step
    std::size_t num_model_looks_ = 0, num_host_looks_ = 0;  // so requests take turns

    // Kept from step to step for their memory.
    std::vector<HostNodes> host_;
    std::vector<ModelNodes> model_;
    std::vector<double> values_;
    std::vector<std::size_t> free_, with_draft_;  // requests to allocate for; those of them with a host draft
    std::vector<std::size_t> max_nodes_;          // of those to allocate for
    std::size_t num_fixed_drafting_ = 0;          // requests with fixed drafts for which the model drafter runs
    std::int32_t num_fixed_nodes_ = 0;            // the most nodes of a request with fixed drafts
};

}  // namespace sglang_hvd
