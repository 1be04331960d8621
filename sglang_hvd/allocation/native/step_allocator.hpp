// The drafts of each step: the search of allocate.hpp at the pace of pace.hpp, requests that are bound
// to the model drafter's draft, and looks at drafts that nothing was heard of for long.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "allocate.hpp"
#include "pace.hpp"
#include "waits.hpp"
#include "width_looks.hpp"

namespace sglang_hvd {

// What is expected of the drafts of a batch; row i belongs to request i.
struct BatchOdds {
    std::size_t row = 0;                     // entries in a row of probs and depths
    const float* probs = nullptr;            // [requests][row]
    const std::int32_t* depths = nullptr;    // likewise
    std::span<const std::int32_t> num_nodes;  // by request
    std::size_t max_steps = 0;
    const float* reaches = nullptr;           // [requests][sizes][max_steps]
    const float* reaches_if_right = nullptr;  // likewise
};

// By request: see Allocation in allocator.py.
struct StepDrafts {
    std::span<std::int32_t> num_cache, num_model, model_size;
    std::span<float> model_expected;
};

// Places in BatchCosts, and most nodes of a cache draft that a request verifies.
struct StepShape {
    std::size_t width = 0, steps = 0;
    std::int32_t most_cache = 0;
};

class StepAllocator {
public:
    // sizes: of the model drafter's draft, rising. merges: see Allocator.
    // look_after: so many steps without any draft of one kind, and one request verifies one; without one
    // in some number of steps, and all do to which it brings anything; without one of some width, and one
    // has it.
    StepAllocator(std::vector<std::int32_t> sizes, bool merges, int look_after)
        : sizes_(std::move(sizes)), look_after_(look_after), width_looks_(look_after), allocator_(merges) {}

    std::span<const std::int32_t> sizes() const { return sizes_; }
    Pace& pace() { return pace_; }

    // is_pinned: by request, those that verify the model drafter's largest draft alone, whatever it
    // brings; null: none does. next_waits: the next step waits for this one's tokens whatever it has.
    StepShape allocate(std::span<const std::int32_t> slots, const bool* is_pinned, const BatchOdds& odds,
                       const BatchCosts& costs, bool next_waits, const StepDrafts& out) {
        const std::size_t num = slots.size();
        if (num == 0) return {};
        const std::int32_t whole = sizes_.back();
        gather(slots, is_pinned, odds);
        Limits limits;
        limits.num_pinned = num - free_.size();
        if (limits.num_pinned > 0) {
            limits.min_width = place_of_width(costs, whole);
            limits.min_steps = costs.num_steps.size() - 1;
        }
        count_step(num, costs);
        const bool is_off = is_model_off();
        const bool looks_at_steps = limits.num_pinned == 0 && is_due(longest_without(), is_off);
        if ((is_off || looks_at_steps) && !free_.empty()) {
            steps_without_look_ = 0;
            limits.must_draft = ++num_model_looks_ % free_.size();
            limits.min_width = std::max(limits.min_width, place_of_width(costs, sizes_.front()));
            if (looks_at_steps) {
                // For as many requests as draft otherwise, if any: times of as many are compared.
                limits.drafts_for_nothing = !is_off;
                limits.min_steps = longest_without();
                limits.end_steps = limits.min_steps + 1;
            }
        }
        const bool is_free = limits.num_pinned == 0 && !limits.must_draft;
        const std::size_t width_due = is_free ? width_looks_.due() : 0;
        if (width_due > 0) {
            width_looks_.look(width_due);
            limits.min_width = width_due;
            limits.end_width = width_due + 1;
        }
        const Allocation& found = search(num, odds, costs, limits);
        const bool is_bound = next_waits || !is_free || width_due > 0;
        const bool has_drafts = is_bound || waits_.pays(found.gained_ms, found.more_ms, costs.wait);
        std::size_t num_drafting = 0, num_cached = 0;
        for (std::size_t k = 0; k < free_.size(); ++k) {
            const Choice choice = has_drafts ? found.choices[k] : Choice{};
            write(out, free_[k], choice.num_cache, 0, 0, 0);
            num_cached += choice.num_cache > 0;
            if (choice.model_size < 0) continue;
            ++num_drafting;
            const ModelNodes& model = model_[k * sizes_.size() + static_cast<std::size_t>(choice.model_size)];
            write(out, free_[k], choice.num_cache, num_nodes(model, costs, found.steps), model.num_nodes,
                  expect_model(model, costs.num_steps[found.steps]));
        }
        const bool looks_at_cache = is_due_at_cache(num_cached) && !limits.must_draft;
        if (looks_at_cache) {
            steps_without_cache_ = 0;
            const std::size_t i = with_draft_[++num_cache_looks_ % with_draft_.size()];
            num_drafting -= out.num_model[i] > 0;
            write(out, i, 1, 0, 0, 0);
        }
        steps_without_model_ = num_drafting > 0 ? 0 : steps_without_model_ + 1;
        for (std::int64_t& steps : without_) ++steps;
        if (num_drafting + limits.num_pinned > 0) without_[found.steps] = 0;
        if (limits.num_pinned > 0) {
            num_drafting += limits.num_pinned;
            for (std::size_t i = 0; i < num; ++i)
                if (is_pinned[i]) write(out, i, 0, whole, whole, 0);
        }
        std::int32_t used = 0, most_cache = 0;
        for (std::size_t i = 0; i < num; ++i) {
            used = std::max(used, out.num_cache[i] + out.num_model[i]);
            most_cache = std::max(most_cache, out.num_cache[i]);
        }
        // What was found for a width may fit into a narrower one.
        const std::size_t width = place_of_width(costs, used);
        width_looks_.run(width, is_free && width_due == 0 && !looks_at_cache);
        const bool is_weighed = has_drafts && !is_bound && used > 0;
        waits_.end_step(is_weighed);
        num_weighed_ = is_weighed ? num : 0;
        ms_price_ = pace_.price(num, costs.step[0]);
        pace_.see_step(costs.step[width] + costs.draft_ms(found.steps)[num_drafting] + costs.wait, costs.step[0]);
        return {width, found.steps, most_cache};
    }

    // A step that was launched, without drafts, before these odds of it were known. Returns whether drafts
    // would have been worth the wait, or are to be looked at: then the next one should not be launched so.
    bool wants_drafts(std::span<const std::int32_t> slots, const bool* is_pinned, const BatchOdds& odds,
                      const BatchCosts& costs) {
        const std::size_t num = slots.size();
        if (num == 0) return false;
        gather(slots, is_pinned, odds);
        count_step(num, costs);
        ++steps_without_model_;
        for (std::int64_t& steps : without_) ++steps;
        width_looks_.run(0, true);
        pace_.see_step(costs.step[0], costs.step[0]);
        waits_.end_step(false);
        // What is_due_at_cache counts; the step that it asks for comes behind this one.
        const bool looks_at_cache = is_due_at_cache(0);
        if (free_.size() < num || looks_at_cache || is_model_off() || is_due(longest_without(), false)) return true;
        const Allocation& found = search(num, odds, costs, {});
        return waits_.is_worth_one(found.gained_ms, found.more_ms, costs.wait);
    }

    // How many tokens the step committed for each request.
    void see_tokens(std::span<const std::int32_t> slots, std::span<const std::int32_t> num_tokens) {
        if (num_weighed_ > 0 && num_weighed_ == slots.size()) {
            double brought = 0;
            for (std::size_t i = 0; i < slots.size(); ++i)
                brought += pace_.token_value(slots[i]) * (num_tokens[i] - 1);
            waits_.see(brought / ms_price_);
        }
        num_weighed_ = 0;
        pace_.see_tokens(slots, num_tokens);
    }

private:
    void count_step(std::size_t num, const BatchCosts& costs) {
        without_.resize(costs.num_steps.size());
        ++steps_without_look_;
        width_looks_.begin(num, costs.widths.size());
    }

    // The drafts of the requests that are not pinned.
    void gather(std::span<const std::int32_t> slots, const bool* is_pinned, const BatchOdds& odds) {
        cache_.clear();
        model_.clear();
        values_.clear();
        free_.clear();
        for (std::size_t i = 0; i < slots.size(); ++i) {
            if (is_pinned != nullptr && is_pinned[i]) continue;
            free_.push_back(i);
            values_.push_back(pace_.token_value(slots[i]));
            const auto len = static_cast<std::size_t>(odds.num_nodes[i]);
            cache_.push_back({{odds.probs + i * odds.row, len}, {odds.depths + i * odds.row, len}});
            for (std::size_t size = 0; size < sizes_.size(); ++size) {
                const std::size_t first = (i * sizes_.size() + size) * odds.max_steps;
                model_.push_back({sizes_[size], odds.reaches + first, odds.reaches_if_right + first});
            }
        }
    }

    const Allocation& search(std::size_t num, const BatchOdds& odds, const BatchCosts& costs, const Limits& limits) {
        const Rates rates{values_, pace_.price(num, costs.step[0])};
        return allocator_.allocate({cache_, model_, sizes_.size(), odds.max_steps}, rates, costs, limits);
    }

    bool is_model_off() const { return steps_without_model_ >= look_after_; }

    static void write(const StepDrafts& out, std::size_t i, std::int32_t num_cache, std::int32_t num_model,
                      std::int32_t model_size, double model_expected) {
        out.num_cache[i] = num_cache;
        out.num_model[i] = num_model;
        out.model_size[i] = model_size;
        out.model_expected[i] = static_cast<float>(model_expected);
    }

    // Place of the narrowest width that has room for a root and so many nodes.
    static std::size_t place_of_width(const BatchCosts& costs, std::int32_t num_nodes) {
        const auto found = std::lower_bound(costs.widths.begin(), costs.widths.end(), num_nodes + 1);
        return static_cast<std::size_t>(found - costs.widths.begin());
    }

    // Whether the model drafter is to run in this number of steps, since it did not for long. Where it
    // is off that is rarer: the number of steps that brings most is of interest first.
    bool is_due(std::size_t steps, bool is_off) const {
        const auto num = static_cast<std::int64_t>(without_.size());
        return steps_without_look_ > look_after_ && without_[steps] >= (is_off ? num * look_after_ : look_after_);
    }

    // Place of the number of steps that was not run for longest.
    std::size_t longest_without() const {
        return static_cast<std::size_t>(std::max_element(without_.begin(), without_.end()) - without_.begin());
    }

    // Whether a cache draft's first token is to be verified, since none was for long.
    bool is_due_at_cache(std::size_t num_cached) {
        if (num_cached > 0) {
            steps_without_cache_ = 0;
            return false;
        }
        with_draft_.clear();
        for (std::size_t k = 0; k < free_.size(); ++k)
            if (!cache_[k].probs.empty()) with_draft_.push_back(free_[k]);
        if (with_draft_.empty()) return false;
        return ++steps_without_cache_ > look_after_;
    }

    std::vector<std::int32_t> sizes_;
    int look_after_;
    WidthLooks width_looks_;
    Allocator allocator_;
    Pace pace_;
    Waits waits_;
    std::size_t num_weighed_ = 0;  // requests of the last step, if its drafts were weighed against a wait
    double ms_price_ = 1;          // of that step
    std::int64_t steps_without_model_ = 0, steps_without_cache_ = 0, steps_without_look_ = 0;
    std::vector<std::int64_t> without_;  // steps without a draft, by its number of steps
    std::size_t num_model_looks_ = 0, num_cache_looks_ = 0;  // so requests take turns

    // Kept from step to step for their memory.
    std::vector<CacheNodes> cache_;
    std::vector<ModelNodes> model_;
    std::vector<double> values_;
    std::vector<std::size_t> free_, with_draft_;  // requests that are not pinned; of them with a draft
};

}  // namespace sglang_hvd
