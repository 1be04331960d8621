// The outputs of finished requests, one text for each namespace, within budgets of tokens.
#pragma once

#include <algorithm>
#include <atomic>
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "token_text.hpp"

namespace sglang_hvd {

// Tokens indexed between two moments at which others may read: about 20 us.
constexpr std::size_t kPieceTokens = 256;

struct Namespace;

// The namespace that was longest without an output comes first.
struct NamespaceRank {
    std::uint64_t newest;
    Namespace* space;

    auto operator<=>(const NamespaceRank&) const = default;
};

// What the requests of one namespace may read of each other.
struct Namespace {
    explicit Namespace(BlockPool& pool) : text(pool) {
        std::set<NamespaceRank> ranks = {{0, this}};
        unused_rank = ranks.extract(ranks.begin());
    }

    std::shared_mutex mutex;  // guards text: readers propose, the writer adds and evicts
    TokenText text;

    // Guarded by SharedTexts.
    struct Kept {
        std::uint64_t serial;
        std::size_t num_tokens;
    };
    std::deque<Kept> kept;  // oldest first
    std::size_t num_tokens = 0;
    std::size_t num_table_bytes = 0;  // of text, as SharedTexts counts them
    std::uint64_t num_flushes = 0;
    std::set<NamespaceRank>::node_type unused_rank;  // so that evicting takes no memory
};

// Decides what is kept. Least valuable is what was kept first: of a namespace over its own budget,
// else of all. An output longer than a budget is not kept. A namespace that holds anything has a
// block and tables of its own, which is much for one short output: their number is bounded too, by
// the budget. Where there are too many, the small one that was longest without an output loses all it
// has, so that a flood of small ones displaces none that is large. Evicting is amortised O(1) per
// token, and O(log namespaces) per output. Thread-safe.
class SharedTexts {
public:
    SharedTexts(BlockPool& pool, std::size_t budget, std::size_t namespace_budget)
        : pool_(pool), budget_(budget), namespace_budget_(namespace_budget) {}

    std::shared_ptr<Namespace> open(const std::string& name) {
        std::shared_ptr<Namespace> found;
        {
            const std::lock_guard lock(names_mutex_);
            if (const auto at = by_name_.find(name); at != by_name_.end()) {
                found = at->second;
            } else {
                found = std::make_shared<Namespace>(pool_);
                by_name_.emplace(name, found);
                count_tables(*found);
            }
            if (by_name_.size() <= most_names_) return found;
        }
        const std::lock_guard lock(writer_mutex_);
        const std::lock_guard names(names_mutex_);
        drop_unused_names();
        most_names_ = std::max<std::size_t>(1024, 2 * by_name_.size());
        return found;
    }

    // How often the namespace was flushed: what finished before a flush must not enter after it.
    std::uint64_t num_flushes(const Namespace& space) const {
        const std::lock_guard lock(names_mutex_);
        return space.num_flushes;
    }

    // If it throws, the output is not kept; what had to leave for it may have left.
    void keep(const std::shared_ptr<Namespace>& space, std::span<const Token> output,
              std::uint64_t num_flushes_seen) {
        const std::lock_guard lock(writer_mutex_);
        if (output.empty() || output.size() > std::min(budget_, namespace_budget_)) return;
        if (num_flushes(*space) != num_flushes_seen) return;
        while (space->num_tokens + output.size() > namespace_budget_) evict_oldest(*space);
        while (num_tokens_ + output.size() > budget_) evict_oldest_of_all();
        while (space->kept.empty() && num_spaces_ >= most_spaces()) forget_oldest_small();
        // Entries of evicted outputs go once they are the majority.
        if (by_age_.size() > 64 && by_age_.size() > 2 * num_kept_) drop_evicted();
        // First what takes memory. An entry of by_age_ whose output is not there counts as evicted.
        make_room(*space, output.size() + 1);
        const std::uint64_t serial = next_serial_++;
        by_age_.push_back({serial, space});
        const NamespaceRank rank = rank_of(*space);
        space->kept.push_back({serial, output.size()});
        unrank(rank);
        num_spaces_ += space->kept.size() == 1;
        space->num_tokens += output.size();
        rank_if_small(*space);
        num_tokens_ += output.size();
        ++num_kept_;
        {
            const std::lock_guard write(space->mutex);
            space->text.append(output);
            space->text.close();
        }
        for (bool is_done = false; !is_done;) {
            const std::lock_guard write(space->mutex);
            space->text.index(kPieceTokens);
            is_done = !space->text.has_backlog();
        }
    }

    // Changes the budgets, and evicts what is over them.
    void resize(std::size_t budget, std::size_t namespace_budget) {
        const std::lock_guard lock(writer_mutex_);
        budget_ = budget;
        namespace_budget_ = namespace_budget;
        {
            const std::lock_guard names(names_mutex_);
            for (auto& [name, space] : by_name_) {
                while (space->num_tokens > namespace_budget_) evict_oldest(*space);
            }
        }
        while (num_tokens_ > budget_) evict_oldest_of_all();
        while (num_spaces_ > most_spaces()) forget_oldest_small();
    }

    void flush(const std::string& name) {
        const std::lock_guard lock(writer_mutex_);
        const std::lock_guard names(names_mutex_);
        if (const auto at = by_name_.find(name); at != by_name_.end()) empty(*at->second);
        drop_unused_names();
    }

    void flush_all() {
        const std::lock_guard lock(writer_mutex_);
        const std::lock_guard names(names_mutex_);
        for (auto& [name, space] : by_name_) empty(*space);
        drop_unused_names();
    }

    struct Sizes {
        std::size_t num_requests, num_tokens, num_namespaces, num_table_bytes;
    };
    // Waits for nothing that takes long, and takes as long with many namespaces as with one.
    Sizes sizes() const {
        const std::lock_guard names(names_mutex_);
        return {num_kept_, num_tokens_, by_name_.size(), num_table_bytes_};
    }

    const char* check() const {
        const std::lock_guard lock(writer_mutex_);
        const std::lock_guard names(names_mutex_);
        std::size_t num_tokens = 0, num_kept = 0, num_spaces = 0, num_table_bytes = 0;
        for (const auto& [name, space] : by_name_) {
            const std::lock_guard read(space->mutex);
            if (const char* broken = space->text.check()) return broken;
            if (space->num_table_bytes != space->text.num_table_bytes()) return "a text's tables are miscounted";
            num_table_bytes += space->num_table_bytes;
            std::size_t in_space = 0;
            for (const auto& kept : space->kept) in_space += kept.num_tokens;
            if (in_space != space->num_tokens) return "a namespace's tokens are miscounted";
            if (in_space + space->kept.size() != space->text.size()) return "a text holds more than is kept";
            if (in_space > namespace_budget_) return "a namespace is over its budget";
            num_tokens += in_space;
            num_kept += space->kept.size();
            num_spaces += !space->kept.empty();
            if (is_small(*space) != small_.contains(rank_of(*space))) return "a rank is wrong";
        }
        if (num_tokens != num_tokens_ || num_kept != num_kept_) return "shared tokens are miscounted";
        if (num_table_bytes != num_table_bytes_) return "the tables are miscounted";
        if (num_spaces != num_spaces_) return "the namespaces that hold something are miscounted";
        if (num_spaces > most_spaces()) return "too many namespaces hold something";
        return num_tokens > budget_ ? "the shared cache is over its budget" : nullptr;
    }

private:
    static NamespaceRank rank_of(Namespace& space) {
        return {space.kept.empty() ? 0 : space.kept.back().serial, &space};
    }
    static bool is_small(const Namespace& space) {
        return !space.kept.empty() && space.num_tokens <= 2 * kTokensPerSpace;
    }
    void rank_if_small(Namespace& space) {
        if (!is_small(space)) return;
        space.unused_rank.value() = rank_of(space);
        small_.insert(std::move(space.unused_rank));
    }
    void unrank(const NamespaceRank& rank) {
        if (auto node = small_.extract(rank)) rank.space->unused_rank = std::move(node);
    }

    struct Aged {
        std::uint64_t serial;
        std::shared_ptr<Namespace> space;
    };

    // A token takes about 35 bytes, so these namespaces' blocks take about what the budget may.
    static constexpr std::size_t kTokensPerSpace = 512;
    std::size_t most_spaces() const { return std::max<std::size_t>(64, budget_ / kTokensPerSpace); }

    void evict_oldest_of_all() {
        const auto [serial, space] = by_age_.front();
        by_age_.pop_front();
        // What its own namespace evicted before is still listed here.
        if (!space->kept.empty() && space->kept.front().serial == serial) evict_oldest(*space);
    }

    void evict_oldest(Namespace& space) {
        const std::size_t num_tokens = space.kept.front().num_tokens;
        unrank(rank_of(space));
        space.kept.pop_front();
        space.num_tokens -= num_tokens;
        num_tokens_ -= num_tokens;
        --num_kept_;
        num_spaces_ -= space.kept.empty();
        rank_if_small(space);
        {
            const std::lock_guard write(space.mutex);
            if (space.kept.empty()) {
                space.text.clear();
            } else {
                space.text.drop_before(space.text.begin() + static_cast<Position>(num_tokens) + 1);
            }
        }
        count_tables(space);
    }

    // There is one where there are too many: they would else be over the budget together.
    void forget_oldest_small() { forget(*small_.begin()->space); }

    void empty(Namespace& space) {
        ++space.num_flushes;
        forget(space);
    }

    void forget(Namespace& space) {
        unrank(rank_of(space));
        num_tokens_ -= space.num_tokens;
        num_kept_ -= space.kept.size();
        num_spaces_ -= !space.kept.empty();
        space.num_tokens = 0;
        space.kept.clear();
        {
            const std::lock_guard write(space.mutex);
            space.text.clear();
        }
        count_tables(space);
    }

    // Appending and indexing so many tokens takes no memory after that.
    void make_room(Namespace& space, std::size_t num_tokens) {
        const std::lock_guard write(space.mutex);
        TokenText& text = space.text;
        if (text.needs_renumbering()) text.renumber();
        try {
            text.make_room(num_tokens);
            text.reserve(text.size() + num_tokens);
        } catch (...) {
            count_tables(space);
            throw;
        }
        count_tables(space);
    }

    // After each change of a text, by whom changes it.
    void count_tables(Namespace& space) {
        const std::size_t now = space.text.num_table_bytes();
        num_table_bytes_ += now - space.num_table_bytes;  // modulo 2^64, where it shrank
        space.num_table_bytes = now;
    }

    // Entries of evicted outputs.
    void drop_evicted() {
        std::erase_if(by_age_, [](const Aged& aged) {
            return aged.space->kept.empty() || aged.space->kept.front().serial > aged.serial;
        });
    }

    // Nobody holds these, so nobody can miss them.
    void drop_unused_names() {
        drop_evicted();
        std::erase_if(by_name_, [this](const auto& entry) {
            const bool is_unused = entry.second.use_count() == 1 && entry.second->kept.empty();
            if (is_unused) num_table_bytes_ -= entry.second->num_table_bytes;
            return is_unused;
        });
    }

    BlockPool& pool_;
    std::size_t budget_, namespace_budget_;  // guarded by writer_mutex_
    mutable std::mutex writer_mutex_;  // taken before names_mutex_, and that before a Namespace's
    mutable std::mutex names_mutex_;
    std::map<std::string, std::shared_ptr<Namespace>> by_name_;
    std::deque<Aged> by_age_;  // oldest first
    std::size_t most_names_ = 1024;  // names in use before unused ones are looked for
    std::atomic<std::size_t> num_tokens_ = 0, num_kept_ = 0;  // changed under writer_mutex_
    std::atomic<std::size_t> num_table_bytes_ = 0;            // of all texts
    std::size_t num_spaces_ = 0;  // namespaces that hold something
    std::set<NamespaceRank> small_;  // of those the small ones
    std::uint64_t next_serial_ = 0;
};

}  // namespace sglang_hvd
