// Random steps of a whole drafter, which decides by costs or by a rule, with and without limits: propose, choose or
// launch without drafts, lay out, commit, also in parts.
// Each array has exactly its size, so that AddressSanitizer sees every access beyond it.
// Usage: steps SECONDS [FIRST_SEED]. It prints the seed of each run before it begins.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "missing_places.hpp"
#include "step_core.hpp"
#include "verify_tree.hpp"

namespace {

using namespace sglang_hvd;
using Ints = std::vector<std::int32_t>;

constexpr std::uint8_t kCache = 1, kModel = 2;
constexpr std::size_t kNumSteps = 4;
const Ints kSizes = {3, 7}, kWidths = {1, 2, 4, 8, 16};

void require_true(bool is_true, const char* what) {
    if (is_true) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::abort();
}

// The arrays of a batch.
struct Rows {
    std::size_t width;
    Ints token_ids, parents, depths, num_nodes;
    std::vector<float> probs, matches, evidence;

    Rows(std::size_t n, std::size_t width)
        : width(width), token_ids(n * width), parents(n * width), depths(n * width), num_nodes(n), probs(n * width),
          matches(n * kMatchColumns), evidence(n * kEvidenceColumns) {}

    DraftRows rows() {
        return {width,        token_ids.data(), parents.data(),  depths.data(),
                probs.data(), num_nodes.data(), matches.data(), evidence.data()};
    }
};

struct Arrays {
    Rows drafts, branches;
    Ints draft_lens, tree_tokens, tree_parents, tree_depths, tree_nodes;
    std::vector<float> features, positions, accepted_lens, acceptance, tree_acceptance, model_lens, probs, if_right,
        tree_probs;
    std::vector<std::uint8_t> sources;
    std::unique_ptr<bool[]> is_chain;

    Arrays(std::size_t n, std::size_t width)
        : drafts(n, width), branches(n, width), draft_lens(n), tree_tokens(n * width), tree_parents(n * width),
          tree_depths(n * width), tree_nodes(n), features(n * kNumDraftFeatures),
          positions(n * kNumPositionFeatures * kMaxDepth), accepted_lens(n), acceptance(n * kMaxDepth),
          tree_acceptance(n * kMaxDepth), model_lens(n), probs(n * kSizes.size() * kNumSteps), if_right(probs.size()),
          tree_probs(n * width), sources(n * width), is_chain(new bool[n * width]()) {}

    StepArrays arrays() {
        StepArrays of;
        of.drafts = of.votes = drafts.rows();
        of.branches = branches.rows();
        of.draft_lens = draft_lens.data();
        of.features = features.data();
        of.positions = positions.data();
        of.accepted_lens = accepted_lens.data();
        of.acceptance = acceptance.data();
        of.tree_acceptance = tree_acceptance.data();
        of.model_lens = model_lens.data();
        of.model_probs = probs.data();
        of.model_probs_if_right = if_right.data();
        of.num_sizes = kSizes.size();
        of.num_steps = kNumSteps;
        of.trees = {drafts.width,      tree_tokens.data(), tree_parents.data(), tree_depths.data(),
                    tree_probs.data(), is_chain.get(),     sources.data(),      tree_nodes.data()};
        return of;
    }
};

BatchCosts costs_of(std::size_t n, std::mt19937& random) {
    BatchCosts costs;
    costs.widths = kWidths;
    const double per_node = random() % 2 ? 0.01 : 0.4;
    for (const auto width : kWidths) costs.step.push_back(5 + per_node * width * static_cast<double>(n));
    costs.rounds = {{0, 2, 8}, {0, static_cast<std::int32_t>(kNumSteps), 16}};
    for (const Round& round : costs.rounds)
        for (std::size_t i = 0; i <= n; ++i) costs.draft.push_back(i == 0 ? 0 : 0.3 * round.num_steps);
    costs.wait = random() % 2 ? 0 : 1.5;
    return costs;
}

// The layout of a request's chosen nodes.
void lay_out(std::span<const std::int32_t> tokens, std::span<const std::int32_t> parents) {
    const std::size_t w = tokens.size() + 1 + tokens.size() % 3;
    std::vector<std::int64_t> token_ids(w), node_parents(w), positions(w), next(w), sibling(w);
    std::vector<std::uint8_t> mask(w * (w + 5));
    write_nodes({tokens, parents, 7}, token_ids, node_parents);
    TreeLayouter().lay_out(node_parents, tokens.size() + 1, 5, {positions, next, sibling, mask.data() + 5, w + 5});
    for (std::size_t slot = 1; slot <= tokens.size(); ++slot)
        require_true(positions[slot] == positions[static_cast<std::size_t>(node_parents[slot])] + 1, "a node's depth");
}

void run(std::uint32_t seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t end) { return static_cast<std::int32_t>(random() % end); };
    CacheSettings settings;
    settings.shared_tokens = settings.namespace_tokens = 400;
    settings.indexes_in_background = random() % 2;
    CacheCore cache(settings);
    std::vector<std::uint8_t> classes(60);
    for (auto& flags : classes) flags = static_cast<std::uint8_t>(random());
    Tracker tracker(1 + below(9), classes);
    const std::vector<float> mean(kNumDraftFeatures), std(kNumDraftFeatures, 1.f);
    std::vector<float> weight(kNumDraftFeatures * (kNumBuckets + kNumPositionFeatures));
    for (float& value : weight) value = (static_cast<float>(random() % 100) - 50) / 500;
    Network network(mean, std);
    network.add_layer(weight, std::vector<float>(kNumBuckets + kNumPositionFeatures, 1.f));
    Calibration calibration(6);
    ModelPredictor model(kNumSteps, kSizes.back(), 0.21);
    StepAllocator allocator({{kSizes[0], 0}, {kSizes[1], 0}}, random() % 2, 8);
    constexpr std::array policies = {"payoff", "frequency", "cache", "both", "model"};
    std::optional<Rule> rule;
    if (random() % 2) {
        const std::optional<double> threshold = random() % 2 ? std::optional(0.5 + below(70)) : std::nullopt;
        rule.emplace(policies[random() % policies.size()], threshold, 1.0, random() % 4 > 0, kModel,
                     kSizes.back() + below(9), static_cast<std::int32_t>(kNumSteps), kSizes.back());
    }
    StepCore core(cache, &tracker, {{&model, kModel, kSizes, {model.odds_of(3), 1.0}}}, rule ? nullptr : &allocator,
                  rule, 4, kCache, false);
    core.use_predictor(&network, true, random() % 4 ? &calibration : nullptr);
    const std::size_t width = 1 + random() % 15;
    Ints of_cache, of_rest;
    for (int step = 0; step < 60; ++step) {
        while (of_cache.empty() || (of_cache.size() < 6 && random() % 3 == 0)) {
            Ints prompt(random() % 80);
            for (auto& token : prompt) token = below(6) * 10;
            const std::string space(1, static_cast<char>('a' + below(2)));
            const bool teaches = random() % 4;
            of_cache.push_back(cache.start(space, prompt));
            of_rest.push_back(tracker.start(prompt, space, teaches));
            model.start(of_rest.back());
            allocator.pace().start(of_rest.back());
            core.start(of_cache.back(), static_cast<std::int64_t>(prompt.size()));
        }
        const std::size_t n = of_cache.size();
        Arrays owned(n, width);
        const StepArrays arrays = owned.arrays();
        const StepSlots slots{of_cache, of_rest};
        std::unique_ptr<bool[]> limited(new bool[3 * n]);
        Ints max_tokens(n);
        for (std::size_t i = 0; i < 3 * n; ++i) limited[i] = random() % 2;
        for (auto& max : max_tokens) max = random() % 2 ? below(9) : 1 << 30;
        AskedLimits asked;
        if (random() % 2) asked = {{limited.get(), n}, {limited.get() + n, n}, {limited.get() + 2 * n, n}, max_tokens};
        const std::int32_t longest_draft = below(width + 1);
        core.propose(slots, asked, longest_draft, random() % 2 ? std::optional(longest_draft) : std::nullopt, arrays);
        Ints num_host(n), num_model(n), sizes(n), chain_lens(n), tokens(n * width), parents(n * width);
        std::vector<float> predicted(n), chain_predicted(n);
        std::vector<std::uint8_t> host_sources(n);
        const std::unique_ptr<bool[]> are_trees(new bool[n]());
        const BatchCosts costs = costs_of(n, random);
        const StepPrices prices{rule ? nullptr : &costs, 1.0, random() % 2 == 0};
        if (!rule && random() % 6 == 0) {
            core.wants_drafts(slots, asked, arrays, prices);
        } else {
            const StepChoice choice{{num_host, num_model, sizes, predicted}, chain_lens,   chain_predicted,
                                    {are_trees.get(), n},                    host_sources, tokens.data(),
                                    parents.data(),                          width};
            const auto found = core.choose(slots, asked, arrays, prices, choice);
            for (std::size_t i = 0; i < n; ++i) {
                const auto num = static_cast<std::size_t>(num_host[i]);
                require_true(num_host[i] <= found.max_host, "a draft is longer than the longest");
                lay_out({tokens.data() + i * width, num}, {parents.data() + i * width, num});
            }
        }
        const std::size_t middle = random() % 3 ? n : random() % (n + 1);
        for (const auto& [first, last] : {std::pair{std::size_t{0}, middle}, std::pair{middle, n}}) {
            if (first == last) continue;
            const std::size_t num = last - first, longest = width + 1;
            Ints committed(num * longest), lengths(num), accepted(num), of_model(num);
            for (std::size_t i = 0; i < num; ++i) {
                const std::int32_t host = num_host[first + i];
                std::int32_t right = host > 0 && random() % 2 ? below(static_cast<std::size_t>(host) + 1) : 0;
                if (host == 0 && num_model[first + i] > 0) right = below(std::min<std::size_t>(kNumSteps, width) + 1);
                for (std::int32_t j = 0; j <= right; ++j)
                    committed[i * longest + static_cast<std::size_t>(j)] =
                        j < host ? tokens[(first + i) * width + static_cast<std::size_t>(j)] : below(6) * 10;
                lengths[i] = right + 1;
                accepted[i] = right;
                of_model[i] = below(3) - 1;
            }
            std::unique_ptr<bool[]> teaches(new bool[num]);
            for (std::size_t i = 0; i < num; ++i) teaches[i] = random() % 2;
            core.commit({std::span(of_cache).subspan(first, num), std::span(of_rest).subspan(first, num)},
                        random() % 2 ? std::span<const bool>{teaches.get(), num} : std::span<const bool>{},
                        {committed.data(), longest, lengths, accepted, of_model});
        }
        if (random() % 4 == 0) {
            const auto place = static_cast<std::ptrdiff_t>(random() % n);
            cache.finish(of_cache[static_cast<std::size_t>(place)], random() % 2, std::nullopt);
            tracker.finish(of_rest[static_cast<std::size_t>(place)]);
            of_cache.erase(of_cache.begin() + place);
            of_rest.erase(of_rest.begin() + place);
        }
    }
    cache.drain();
    require_true(cache.check() == nullptr, "the cache");
}

// What the draft KV caches lack, in any order of calls. No place holds two tokens.
void run_missing(std::uint32_t seed) {
    std::mt19937 random(seed);
    MissingPlaces missing;
    std::vector<std::int64_t> slots(9), cached(9);
    for (int step = 0; step < 60; ++step) {
        for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
        std::shuffle(slots.begin(), slots.end(), random);
        const std::size_t n = 1 + random() % slots.size();
        std::vector<std::int64_t> lens;
        for (const auto slot : slots) lens.push_back(cached[static_cast<std::size_t>(slot)]);
        const std::span<const std::int64_t> batch{slots.data(), n};
        missing.keep(batch, std::span<const std::int64_t>(lens).first(n), 4);
        if (random() % 3 == 0) missing.forget({&slots[random() % slots.size()], 1});
        for (std::size_t i = 0; i < slots.size(); ++i) lens[i] += random() % 6;
        for (std::size_t i = 0; i < slots.size(); ++i) cached[static_cast<std::size_t>(slots[i])] = lens[i];
        const std::size_t first = random() % n, num = slots.size() - first;
        const auto now = std::span<const std::int64_t>(slots).subspan(first, num);
        const auto settled = missing.settle(now, std::span<const std::int64_t>(lens).subspan(first, num));
        require_true(settled.places.size() == settled.nodes.size(), "each place has its node");
        if (random() % 4) continue;
        std::vector<std::int64_t> all = missing.take(slots);
        std::sort(all.begin(), all.end());
        require_true(std::adjacent_find(all.begin(), all.end()) == all.end(), "a place holds two tokens");
        require_true(all.empty() || all.back() < missing.num_places(), "a place is out of range");
    }
}

}  // namespace

int main(int argc, char** argv) {
    const int seconds = argc > 1 ? std::atoi(argv[1]) : 60;
    auto seed = static_cast<std::uint32_t>(argc > 2 ? std::atoi(argv[2]) : 0);
    const auto stop = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    std::uint32_t num_runs = 0;
    for (; std::chrono::steady_clock::now() < stop; ++seed, ++num_runs) {
        std::printf("\rseed %u", seed);
        std::fflush(stdout);
        run(seed);
        run_missing(seed);
    }
    std::printf("\nsteps: sound, %u runs\n", num_runs);
}
