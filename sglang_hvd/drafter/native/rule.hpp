// The limits that requests ask for, and the policies that decide request by request, by a rule. Such a policy
// verifies drafts of any length that fits into a verification. tests/drafter/rule_oracle.py does the same in Python.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "calibration.hpp"
#include "draft_layout.hpp"

namespace sglang_hvd {

// By request: see BatchLimits in request.py. Without values there are no limits.
struct AskedLimits {
    std::span<const bool> are_fixed, take_cache, take_model;
    std::span<const std::int32_t> max_tokens;

    bool is_fixed(std::size_t i) const { return !are_fixed.empty() && are_fixed[i]; }
    std::int32_t max_of(std::size_t i) const {
        return max_tokens.empty() ? std::numeric_limits<std::int32_t>::max() : max_tokens[i];
    }
    // Longest cache draft, where it is `limit` for requests without limits.
    std::int32_t max_chain(std::size_t i, std::int32_t limit) const {
        return is_fixed(i) && !take_cache[i] ? 0 : std::min(limit, max_of(i));
    }
    // Nodes of a draft that may branch, where they are `limit` for requests without limits. A request whose sources
    // are fixed verifies chains.
    std::int32_t max_branch(std::size_t i, std::int32_t limit) const {
        return is_fixed(i) ? 0 : std::min(limit, max_of(i));
    }
};

// What a rule knows of a request. acceptance: null if bare lengths are predicted.
struct RuleInput {
    std::int32_t num_drafted;
    float score;
    float accepted_len, model_len;
    const float* acceptance;
    bool is_fallback;
};

class Rule {
public:
    struct Nodes {
        std::int32_t num_host, num_model;
    };

    // policy: as in config.py, but not allocate. threshold, min_score: threshold and frequency_threshold there;
    // without a threshold, policy payoff compares both drafts. has_model: the policy verifies drafts of the model
    // drafter. drafter: bit of the model drafter. room: nodes of a verification, root not counted. num_steps,
    // num_nodes: of the model drafter's draft, root not counted.
    Rule(std::string_view policy, std::optional<double> threshold, double min_score, bool has_model,
         std::uint8_t drafter, std::int32_t room, std::int32_t num_steps, std::int32_t num_nodes)
        : kind_(kind_of(policy)),
          merges_(policy == "both"),
          has_model_(has_model),
          drafter_(drafter),
          room_(merges_ ? room - num_nodes : room),
          num_steps_(num_steps),
          num_nodes_(num_nodes),
          min_score_(min_score),
          threshold_(threshold) {
        if (room_ < 0) throw std::invalid_argument("the model drafter's draft does not fit into a verification");
    }

    std::uint8_t drafter() const { return drafter_; }
    std::int32_t num_steps() const { return num_steps_; }

    Nodes choose(std::size_t i, const AskedLimits& asked, const RuleInput& of) const {
        bool cache = of.num_drafted > 0 && takes_cache(of);
        bool model = has_model_ && (merges_ || !cache);
        if (asked.is_fixed(i)) {
            cache = asked.take_cache[i];
            model = has_model_ && asked.take_model[i];
        }
        const std::int32_t num_model = model ? std::min(num_nodes_, asked.max_of(i)) : 0;
        const std::int32_t num_host = cache ? std::min(of.num_drafted, room_) : 0;
        return {std::min(num_host, asked.max_of(i) - num_model), num_model};
    }

private:
    enum class Kind { kNoCache, kAnyCache, kByScore, kByPayoff };

    static Kind kind_of(std::string_view policy) {
        if (policy == "model") return Kind::kNoCache;
        if (policy == "cache" || policy == "both") return Kind::kAnyCache;
        if (policy == "frequency") return Kind::kByScore;
        if (policy == "payoff") return Kind::kByPayoff;
        throw std::invalid_argument("no policy by rule: " + std::string(policy));
    }

    // Thresholds are compared as double, since float would round them.
    bool takes_cache(const RuleInput& of) const {
        switch (kind_) {
            case Kind::kNoCache:
                return false;
            case Kind::kAnyCache:
                return true;
            case Kind::kByScore:
                return by_score(of);
            case Kind::kByPayoff:
                return of.is_fallback ? by_score(of) : by_payoff(of);
        }
        return false;
    }

    // ArcticInference's rule, which sets the threshold to the number of tokens the model drafter drafts
    // (arctic_inference/vllm/model_runner.py, min_score).
    bool by_score(const RuleInput& of) const { return of.score >= min_score_; }

    bool by_payoff(const RuleInput& of) const {
        // The draft with the longer predicted acceptance. This compares tokens, not time: a cycle that drafts with
        // the model takes longer.
        if (!threshold_) return of.accepted_len >= of.model_len;
        if (of.acceptance == nullptr) return of.accepted_len >= *threshold_;  // the paper's gate (section 3.4)
        // The same with probabilities: the draft reaches the threshold more likely than not.
        const double depth = std::ceil(*threshold_);
        if (depth < 1) return true;
        return depth <= kMaxDepth && of.acceptance[static_cast<std::size_t>(depth) - 1] >= 0.5f;
    }

    Kind kind_;
    bool merges_, has_model_;
    std::uint8_t drafter_;
    std::int32_t room_, num_steps_, num_nodes_;
    double min_score_;
    std::optional<double> threshold_;
};

}  // namespace sglang_hvd
