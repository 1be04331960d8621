// The search for the drafts that each request of a batch verifies, and for the width of the step, so that the
// step makes the most progress in its time. docs/experiments/allocation.md derives it.
//
// Drafts that the host knows cost only the nodes to verify. The nodes of all such sources are one list per
// request. Drafters on the device draft in rounds that the requests of a step share. A step runs one round at
// most, so the search tries every round and, for each, lets the requests draft that gain most.
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

// A draft that the host knows: its nodes, the most probable first, so that its first nodes are the draft to
// verify with less room.
struct HostNodes {
    std::span<const float> probs;
    std::span<const std::int32_t> depths;  // from 1
};

// A device drafter's draft in one size: P(at least s + 1 tokens are accepted), in all cycles and in those in
// which the host's draft is right so far.
struct ModelNodes {
    std::int32_t num_nodes;
    const float* probs;           // float[num_steps]
    const float* probs_if_right;  // float[num_steps]
};

// A size that a drafter's draft may have. Each drafter's sizes rise.
struct DraftSize {
    std::int32_t num_nodes, drafter;
};

// What the device may run before a verification: one drafter in a number of steps. Each drafter's rounds are
// side by side, and their steps rise.
struct Round {
    std::int32_t drafter, num_steps;
    std::int32_t max_nodes;  // that the draft can have in so many steps
};

// Predicted accepted tokens of the first num_host nodes of the host's draft and the model's draft together,
// for each number of steps up to max_steps: out[s] with s + 1 of them.
//   P(either is right up to depth d) = H(d) + M(d) - H(d) M(d | the host's draft is right)
inline void predict_both(const HostNodes& host, std::size_t num_host, const ModelNodes& model,
                         std::size_t max_steps, std::vector<double>& by_depth, double* out) {
    by_depth.assign(max_steps, 0);
    double sum = 0;
    for (std::size_t node = 0; node < num_host; ++node) {
        const double prob = host.probs[node];
        const auto depth = static_cast<std::size_t>(host.depths[node]);
        sum += prob;
        if (depth <= max_steps) by_depth[depth - 1] += prob;
    }
    for (std::size_t step = 0; step < max_steps; ++step) {
        const double of_host = std::min(by_depth[step], 1.0);
        sum += std::max(model.probs[step] - of_host * model.probs_if_right[step], 0.0);
        out[step] = sum;
    }
}

inline double predict_host(const HostNodes& host, std::size_t num_host) {
    double sum = 0;
    for (std::size_t node = 0; node < num_host; ++node) sum += host.probs[node];
    return sum;
}

// Predicted accepted tokens of a model's draft of so many steps.
inline double predict_model(const ModelNodes& model, std::int32_t num_steps) {
    double sum = 0;
    for (std::int32_t step = 0; step < num_steps; ++step) sum += model.probs[step];
    return sum;
}

// Times in milliseconds, of this batch.
struct BatchCosts {
    std::vector<std::int32_t> widths;  // nodes per request, root included, rising
    std::vector<double> step;          // by width: the part that every request takes part in
    std::vector<Round> rounds;         // to choose from
    std::vector<double> draft;         // [rounds][all requests + 1]: by how many requests draft
    // Before a step whose drafts are chosen by the tokens of the last: the device waits for the host. A step
    // without drafts that follows another such step does not wait.
    double wait = 0;

    std::size_t num_requests() const { return draft.size() / rounds.size() - 1; }

    // The costs if every step takes so much more.
    BatchCosts with_context(double ms) const {
        BatchCosts longer = *this;
        for (double& of_width : longer.step) of_width += ms;
        return longer;
    }

    // By how many requests draft. round: place in rounds.
    const double* draft_ms(std::size_t round) const { return draft.data() + round * (num_requests() + 1); }
};

// Nodes of a draft of this size in a round; few steps have fewer.
inline std::int32_t num_nodes(const ModelNodes& model, const Round& round) {
    return std::min(model.num_nodes, round.max_nodes);
}

struct Choice {
    std::int32_t num_host = 0;
    std::int32_t size = -1;  // place of the model's size; -1: it does not draft
};

struct Allocation {
    std::vector<Choice> choices;
    std::vector<double> predicted;     // by request: accepted tokens
    std::size_t width = 0, round = 0;  // places in BatchCosts
    double ms = 0;                     // the time of the step
    // Of the drafts, compared with a step without drafts: the gain, as time, and the additional time.
    double gained_ms = 0, more_ms = 0;
};

// The drafts of the requests to allocate for.
struct Drafts {
    std::span<const HostNodes> host;          // by request
    std::span<const ModelNodes> model;        // [request][size]
    std::span<const DraftSize> sizes;         // of all drafters
    std::size_t max_steps;                    // entries of probs and probs_if_right
    std::span<const std::size_t> max_nodes;  // by request: of all its drafts together
};

// What progress and time are worth.
struct Rates {
    std::span<const double> values;  // of a token of each request
    double price;                    // of a millisecond
};

// What may be chosen. Ends are one past the last place; 0: no limit.
struct Limits {
    std::size_t num_fixed_drafting = 0;        // further requests, for which the round runs in any case
    std::optional<std::size_t> must_draft;     // a request for which it runs, too
    std::size_t min_width = 0, end_width = 0;  // places in BatchCosts
    std::size_t min_round = 0, end_round = 0;  // places in BatchCosts
    bool drafts_are_free = false;              // every request drafts that gains anything
};

class Allocator {
public:
    // merges: a request may verify drafts of the host and of the model together.
    explicit Allocator(bool merges) : merges_(merges) {}

    const Allocation& allocate(const Drafts& drafts, const Rates& rates, const BatchCosts& costs,
                               const Limits& limits) {
        const std::size_t end_width = limits.end_width > 0 ? limits.end_width : costs.widths.size();
        wants_more_ = true;  // else a wider step would only cost more
        end_width_ = limits.min_width;
        at_widths_.resize(costs.widths.size());
        while (wants_more_ && end_width_ < end_width) {
            const auto room = static_cast<std::size_t>(costs.widths[end_width_] - 1);
            predict_at(at_widths_[end_width_++], drafts, room, costs.rounds);
        }
        search(drafts.host.size(), rates, costs, limits);
        double gained = 0;
        for (std::size_t i = 0; i < best_.predicted.size(); ++i) gained += rates.values[i] * best_.predicted[i];
        best_.gained_ms = gained / rates.price;
        best_.more_ms = best_.ms - costs.step[0];
        return best_;
    }

private:
    struct Option {
        double predicted = 0;
        Choice choice;
    };
    struct Gain {
        double value;
        std::size_t request;
    };

    // With so much room: what each request's host draft gains alone, and together with the model's draft in
    // its best size.
    struct AtWidth {
        std::vector<Choice> alone_choices;
        std::vector<double> alone;
        std::vector<Option> with_model;  // [request][round]
    };

    void predict_at(AtWidth& at, const Drafts& drafts, std::size_t room, std::span<const Round> rounds) {
        const auto [host, model, sizes, max_steps, max_nodes] = drafts;
        const std::size_t num = host.size(), num_rounds = rounds.size();
        at.alone.resize(num);
        at.alone_choices.resize(num);
        at.with_model.assign(num * num_rounds, {});
        by_steps_.resize(max_steps);
        wants_more_ = false;
        for (std::size_t i = 0; i < num; ++i) {
            const std::size_t len = host[i].probs.size();
            const std::size_t own_room = std::min(room, max_nodes[i]);
            const bool may_grow = own_room < max_nodes[i];  // in a wider step
            at.alone[i] = predict_host(host[i], std::min(len, own_room));
            at.alone_choices[i] = {static_cast<std::int32_t>(std::min(len, own_room)), -1};
            wants_more_ |= may_grow && len > room;
            for (std::size_t size = 0; size < sizes.size(); ++size) {
                const ModelNodes& of_size = model[i * sizes.size() + size];
                const std::size_t host_len = merges_ ? len : 0;
                std::size_t known = len + 1;  // the num_host that by_steps_ was computed for
                for (std::size_t r = num_rounds; r-- > 0;) {
                    if (rounds[r].drafter != sizes[size].drafter) continue;
                    const auto nodes = static_cast<std::size_t>(num_nodes(of_size, rounds[r]));
                    wants_more_ |= may_grow && host_len + nodes > room;
                    if (nodes > own_room) continue;
                    const std::size_t num_host = std::min(host_len, own_room - nodes);
                    if (num_host != known)
                        predict_both(host[i], num_host, of_size, max_steps, by_depth_, by_steps_.data());
                    known = num_host;
                    const double predicted = by_steps_[static_cast<std::size_t>(rounds[r].num_steps) - 1];
                    Option& option = at.with_model[i * num_rounds + r];
                    if (option.choice.size < 0 || predicted > option.predicted)
                        option = {predicted,
                                  {static_cast<std::int32_t>(num_host), static_cast<std::int32_t>(size)}};
                }
            }
        }
    }

    // The best choice at these rates.
    void search(std::size_t num, const Rates& rates, const BatchCosts& costs, const Limits& limits) {
        const auto [values, price] = rates;
        const auto num_fixed = limits.num_fixed_drafting;
        const auto must_draft = limits.must_draft;
        const double draft_price = limits.drafts_are_free ? 0 : price;
        const std::size_t num_rounds = costs.rounds.size();
        const std::size_t end_round = limits.end_round > 0 ? limits.end_round : num_rounds;
        double best_score = -std::numeric_limits<double>::infinity();
        std::size_t num_draft = 0;
        best_.width = limits.min_width;
        best_.round = limits.min_round;
        for (std::size_t width = limits.min_width; width < end_width_; ++width) {
            const AtWidth& at = at_widths_[width];
            double of_host = -price * costs.step[width];
            for (std::size_t i = 0; i < num; ++i) of_host += values[i] * at.alone[i];
            for (std::size_t round = limits.min_round; round < end_round; ++round) {
                const double* draft_ms = costs.draft_ms(round) + num_fixed;
                const double all_gains = gain_of_model(at, num, round, num_rounds, values, must_draft);
                // Upper bound: all gains for the price of one drafting request, since drafting never costs
                // less for more requests (StepCosts checks it). If the bound does not beat best_score the
                // sort is skipped. kRounding allows for sums in another order and for interpolated times.
                const double of_none = of_host - draft_price * draft_ms[0];
                double of_any = of_none;
                if (!gains_.empty()) {
                    const double drafting = draft_price * draft_ms[1];
                    of_any = of_host + all_gains - drafting +
                             kRounding * (std::abs(of_host) + all_gains + drafting);
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
                if (of_host + best_gain > best_score) {
                    best_score = of_host + best_gain;
                    best_.width = width;
                    best_.round = round;
                    num_draft = num_best;
                }
            }
        }
        const AtWidth& at = at_widths_[best_.width];
        gain_of_model(at, num, best_.round, num_rounds, values, must_draft);
        sort_gains(must_draft);
        keep(at, best_.round, num_rounds, num_draft);
        best_.ms = costs.step[best_.width] + costs.draft_ms(best_.round)[num_fixed + num_draft];
    }

    // Lists the requests that gain by the model's draft in gains_, and returns the sum of their gains.
    double gain_of_model(const AtWidth& at, std::size_t num, std::size_t round, std::size_t num_rounds,
                         std::span<const double> values, std::optional<std::size_t> must_draft) {
        gains_.clear();
        double sum = 0;
        for (std::size_t i = 0; i < num; ++i) {
            const Option& option = at.with_model[i * num_rounds + round];
            if (option.choice.size < 0) continue;
            const double value = values[i] * (option.predicted - at.alone[i]);
            if (value > 0 || must_draft == i) gains_.push_back({value, i});
            sum += std::max(value, 0.0);
        }
        return sum;
    }

    // The largest first; must_draft before all.
    void sort_gains(std::optional<std::size_t> must_draft) {
        std::sort(gains_.begin(), gains_.end(), [&](const Gain& a, const Gain& b) {
            const bool first = must_draft == a.request;
            if (first != (must_draft == b.request)) return first;
            return a.value != b.value ? a.value > b.value : a.request < b.request;
        });
    }

    // The first num_draft requests of gains_ draft.
    void keep(const AtWidth& at, std::size_t round, std::size_t num_rounds, std::size_t num_draft) {
        best_.choices = at.alone_choices;
        best_.predicted = at.alone;
        for (std::size_t place = 0; place < num_draft; ++place) {
            const std::size_t i = gains_[place].request;
            const Option& option = at.with_model[i * num_rounds + round];
            best_.choices[i] = option.choice;
            best_.predicted[i] = option.predicted;
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
