// Which drafts each request of a batch verifies, and how wide, so that most progress is made in the
// time it takes. docs/allocation.md derives it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

namespace sglang_hvd {

// A cache draft: its nodes, the most probable first, so that its first nodes are the draft to verify
// with less room.
struct CacheNodes {
    std::span<const float> probs;
    std::span<const std::int32_t> depths;  // from 1
};

// The model drafter's draft in one size: P(at least s + 1 tokens are accepted), of all cycles and of
// those in which the cache draft is right so far.
struct ModelNodes {
    std::int32_t num_nodes;
    const float* reaches;           // float[num_steps]
    const float* reaches_if_right;  // float[num_steps]
};

// What both drafts are expected to bring together, the first num_cache nodes of the cache draft and
// the model drafter's draft, for each number of steps up to max_steps: out[s] with s + 1 of them.
//   P(either reaches d) = C(d) + M(d) - C(d) M(d | the cache draft is right)
inline void expect_both(const CacheNodes& cache, std::size_t num_cache, const ModelNodes& model,
                        std::size_t max_steps, std::vector<double>& by_depth, double* out) {
    by_depth.assign(max_steps, 0);
    double sum = 0;
    for (std::size_t node = 0; node < num_cache; ++node) {
        const double prob = cache.probs[node];
        const auto depth = static_cast<std::size_t>(cache.depths[node]);
        sum += prob;
        if (depth <= max_steps) by_depth[depth - 1] += prob;
    }
    for (std::size_t step = 0; step < max_steps; ++step) {
        const double of_cache = std::min(by_depth[step], 1.0);
        sum += std::max(model.reaches[step] - of_cache * model.reaches_if_right[step], 0.0);
        out[step] = sum;
    }
}

inline double expect_cache(const CacheNodes& cache, std::size_t num_cache) {
    double sum = 0;
    for (std::size_t node = 0; node < num_cache; ++node) sum += cache.probs[node];
    return sum;
}

// Times in milliseconds, of this batch.
struct BatchCosts {
    std::vector<std::int32_t> widths;  // nodes per request, root included, rising
    std::vector<double> step;          // by width: what every request takes part in
    std::vector<std::int32_t> num_steps;   // of the model drafter, to choose from, rising
    std::vector<std::int32_t> most_nodes;  // by num_steps: that its draft can have then
    std::vector<double> draft;             // [num_steps][all requests + 1]: by how many draft
    // Before a step whose drafts are chosen by the tokens of the last: the device waits for the host.
    // Steps without drafts need not be, behind one without.
    double wait = 0;

    std::size_t num_requests() const { return draft.size() / num_steps.size() - 1; }

    // Where every step takes so much more.
    BatchCosts with_context(double ms) const {
        BatchCosts longer = *this;
        for (double& of_width : longer.step) of_width += ms;
        return longer;
    }

    // By how many requests draft. steps: place in num_steps.
    const double* draft_ms(std::size_t steps) const { return draft.data() + steps * (num_requests() + 1); }
};

// Of a model drafter's draft in this size; few steps have fewer. steps: place in costs.
inline std::int32_t num_nodes(const ModelNodes& model, const BatchCosts& costs, std::size_t steps) {
    return std::min(model.num_nodes, costs.most_nodes[steps]);
}

struct Choice {
    std::int32_t num_cache = 0;
    std::int32_t model_size = -1;  // none
};

// Accepted tokens expected of the first nodes of a model drafter's draft.
inline double expect_model(const ModelNodes& model, std::int32_t num_steps) {
    double sum = 0;
    for (std::int32_t step = 0; step < num_steps; ++step) sum += model.reaches[step];
    return sum;
}

struct Allocation {
    std::vector<Choice> choices;
    std::vector<double> expected;      // by request: accepted tokens
    std::size_t width = 0, steps = 0;  // places in BatchCosts
    double ms = 0;                     // what the step takes
    // Of its drafts, beside a step without: what they bring, as time, and the time that they take.
    double gained_ms = 0, more_ms = 0;
};

// The drafts of the requests to allocate for.
struct Drafts {
    std::span<const CacheNodes> cache;  // by request
    std::span<const ModelNodes> model;  // [request][size], sizes rising
    std::size_t num_sizes;
    std::size_t max_steps;  // entries of reaches and reaches_if_right
};

// What progress and time are worth.
struct Rates {
    std::span<const double> values;  // of a token of each request
    double price;                    // of a millisecond
};

// What may be chosen.
struct Limits {
    std::size_t num_pinned = 0;             // further requests, for which the model drafter runs anyway
    std::optional<std::size_t> must_draft;  // a request for which it runs too
    std::size_t min_width = 0, min_steps = 0;  // lowest places in BatchCosts
    std::size_t end_width = 0, end_steps = 0;  // behind the highest; 0: any
    bool drafts_for_nothing = false;           // all that the model drafter's draft adds to take part
};

class Allocator {
public:
    // merges: a request may verify both drafts.
    explicit Allocator(bool merges) : merges_(merges) {}

    const Allocation& allocate(const Drafts& drafts, const Rates& rates, const BatchCosts& costs,
                               const Limits& limits) {
        const std::size_t num = drafts.cache.size();
        const std::size_t end_width = limits.end_width > 0 ? limits.end_width : costs.widths.size();
        wants_more_ = true;  // else a wider step would only cost more
        end_width_ = limits.min_width;
        at_widths_.resize(costs.widths.size());
        while (wants_more_ && end_width_ < end_width) {
            const auto room = static_cast<std::size_t>(costs.widths[end_width_] - 1);
            look_at(at_widths_[end_width_++], drafts, room, costs);
        }
        search(num, rates, costs, limits);
        return weighed(rates, costs);
    }

private:
    struct Option {
        double expected = 0;
        Choice choice;
    };
    struct Gain {
        double value;
        std::size_t request;
    };

    // With so much room: what each request's cache draft brings alone, and with the model drafter's
    // draft beside it in the best size.
    struct AtWidth {
        std::vector<Choice> alone_choices;
        std::vector<double> alone;
        std::vector<Option> with_model;  // [request][num_steps]
    };

    void look_at(AtWidth& at, const Drafts& drafts, std::size_t room, const BatchCosts& costs) {
        const auto [cache, model, num_sizes, max_steps] = drafts;
        const std::size_t num = cache.size(), num_steps = costs.num_steps.size();
        at.alone.resize(num);
        at.alone_choices.resize(num);
        at.with_model.assign(num * num_steps, {});
        by_steps_.resize(max_steps);
        wants_more_ = false;
        for (std::size_t i = 0; i < num; ++i) {
            const std::size_t len = cache[i].probs.size();
            at.alone[i] = expect_cache(cache[i], std::min(len, room));
            at.alone_choices[i] = {static_cast<std::int32_t>(std::min(len, room)), -1};
            wants_more_ |= len > room;
            for (std::size_t size = 0; size < num_sizes; ++size) {
                const ModelNodes& of_size = model[i * num_sizes + size];
                const std::size_t beside = merges_ ? len : 0;
                std::size_t known = len + 1;  // what by_steps_ is for
                for (std::size_t s = num_steps; s-- > 0;) {
                    const auto nodes = static_cast<std::size_t>(num_nodes(of_size, costs, s));
                    wants_more_ |= beside + nodes > room;
                    if (nodes > room) continue;
                    const std::size_t num_cache = std::min(beside, room - nodes);
                    if (num_cache != known)
                        expect_both(cache[i], num_cache, of_size, max_steps, by_depth_, by_steps_.data());
                    known = num_cache;
                    const double expected = by_steps_[static_cast<std::size_t>(costs.num_steps[s]) - 1];
                    Option& option = at.with_model[i * num_steps + s];
                    if (option.choice.model_size < 0 || expected > option.expected)
                        option = {expected,
                                  {static_cast<std::int32_t>(num_cache), static_cast<std::int32_t>(size)}};
                }
            }
        }
    }

    // The best choice at these rates.
    void search(std::size_t num, const Rates& rates, const BatchCosts& costs, const Limits& limits) {
        const auto [values, price] = rates;
        const auto num_pinned = limits.num_pinned, min_width = limits.min_width, min_steps = limits.min_steps;
        const auto must_draft = limits.must_draft;
        const double draft_price = limits.drafts_for_nothing ? 0 : price;
        const std::size_t num_steps = costs.num_steps.size();
        const std::size_t end_steps = limits.end_steps > 0 ? limits.end_steps : num_steps;
        double best_score = -std::numeric_limits<double>::infinity();
        std::size_t num_draft = 0;
        best_.width = min_width;
        best_.steps = min_steps;
        for (std::size_t width = min_width; width < end_width_; ++width) {
            const AtWidth& at = at_widths_[width];
            double of_cache = -price * costs.step[width];
            for (std::size_t i = 0; i < num; ++i) of_cache += values[i] * at.alone[i];
            for (std::size_t steps = min_steps; steps < end_steps; ++steps) {
                const double* draft_ms = costs.draft_ms(steps) + num_pinned;
                const double most = weigh(at, num, steps, num_steps, values, must_draft);
                // Upper bound: all gains for the price of one drafting request, since drafting never
                // costs less for more requests (StepCosts checks it). If the bound does not beat
                // best_score the sort is skipped. kRounding allows for sums in another order and for
                // interpolated times.
                const double of_none = of_cache - draft_price * draft_ms[0];
                double of_any = of_none;
                if (!gains_.empty()) {
                    const double drafting = draft_price * draft_ms[1];
                    of_any = of_cache + most - drafting + kRounding * (std::abs(of_cache) + most + drafting);
                }
                if (of_any <= best_score && of_none <= best_score) continue;
                sort_gains(must_draft);
                double gained = 0, best_gain = -draft_price * draft_ms[0];
                std::size_t num_best = 0;
                for (const Gain& gain : gains_) {
                    gained += gain.value;
                    const auto count = static_cast<std::size_t>(&gain - gains_.data()) + 1;
                    const double net = gained - draft_price * draft_ms[count];
                    if (net > best_gain || (count == 1 && must_draft)) {
                        best_gain = net;
                        num_best = count;
                    }
                }
                if (of_cache + best_gain > best_score) {
                    best_score = of_cache + best_gain;
                    best_.width = width;
                    best_.steps = steps;
                    num_draft = num_best;
                }
            }
        }
        const AtWidth& at = at_widths_[best_.width];
        weigh(at, num, best_.steps, num_steps, values, must_draft);
        sort_gains(must_draft);
        keep(at, best_.steps, num_steps, num_draft);
        best_.ms = costs.step[best_.width] + costs.draft_ms(best_.steps)[num_pinned + num_draft];
    }

    // The best choice, with what it brings at the pace of the latest steps.
    const Allocation& weighed(const Rates& rates, const BatchCosts& costs) {
        double gained = 0;
        for (std::size_t i = 0; i < best_.expected.size(); ++i) gained += rates.values[i] * best_.expected[i];
        best_.gained_ms = gained / rates.price;
        best_.more_ms = best_.ms - costs.step[0];
        return best_;
    }

    // What the model drafter's draft adds for each request; returns the sum of what adds something.
    double weigh(const AtWidth& at, std::size_t num, std::size_t steps, std::size_t num_steps,
                 std::span<const double> values, std::optional<std::size_t> must_draft) {
        gains_.clear();
        double sum = 0;
        for (std::size_t i = 0; i < num; ++i) {
            const Option& option = at.with_model[i * num_steps + steps];
            if (option.choice.model_size < 0) continue;
            // What brings nothing pays for no round.
            const double value = values[i] * (option.expected - at.alone[i]);
            if (value > 0 || must_draft == i) gains_.push_back({value, i});
            sum += std::max(value, 0.0);
        }
        return sum;
    }

    // Most first; must_draft before all.
    void sort_gains(std::optional<std::size_t> must_draft) {
        std::sort(gains_.begin(), gains_.end(), [&](const Gain& a, const Gain& b) {
            const bool first = must_draft == a.request;
            if (first != (must_draft == b.request)) return first;
            return a.value != b.value ? a.value > b.value : a.request < b.request;
        });
    }

    // The model drafter runs for the first num_draft of gains_.
    void keep(const AtWidth& at, std::size_t steps, std::size_t num_steps, std::size_t num_draft) {
        best_.choices = at.alone_choices;
        best_.expected = at.alone;
        for (std::size_t place = 0; place < num_draft; ++place) {
            const std::size_t i = gains_[place].request;
            const Option& option = at.with_model[i * num_steps + steps];
            best_.choices[i] = option.choice;
            best_.expected[i] = option.expected;
        }
    }

    static constexpr double kRounding = 1e-9;

    bool merges_;
    Allocation best_;
    std::vector<AtWidth> at_widths_;  // by place in BatchCosts, from min_width up to end_width_
    std::size_t end_width_ = 0;
    std::vector<double> by_depth_, by_steps_;
    std::vector<Gain> gains_;
    bool wants_more_ = false;
};

}  // namespace sglang_hvd
