// The shared cache: the outputs of finished requests, one text per namespace, within budgets of tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "token_text.hpp"

namespace sglang_hvd {

// What the requests of one namespace share.
struct Namespace {
    Namespace(BlockPool& pool, std::string name) : name(std::move(name)), text(pool) {
        std::map<std::uint64_t, Namespace*> entries = {{0, this}};
        unused_entry = entries.extract(entries.begin());
    }

    const std::string name;
    TokenText text;
    std::uint64_t num_drafts = 0;  // drafts that were found in the text

    // SharedTexts keeps what follows.
    struct Kept {
        std::uint64_t serial;
        std::size_t num_tokens;
        std::uint64_t offset;   // counts all tokens and ends of the namespace before it
        std::int64_t kept_at;  // seconds since 1970, for people: ranks differ, and it may fall
    };
    std::deque<Kept> kept;  // oldest first
    std::uint64_t newest() const { return kept.empty() ? 0 : kept.back().serial; }  // 0: none
    std::uint64_t next_offset = 0;
    std::size_t num_tokens = 0;
    std::size_t num_table_bytes = 0;  // of text, when it was last counted
    std::uint64_t num_flushes = 0;  // an output that finished before a flush must not enter after it
    std::map<std::uint64_t, Namespace*>::node_type unused_entry;  // kept so that evicting needs no memory
};

// Decides what is kept. The oldest output leaves first: the oldest of a namespace that is over its own
// budget, otherwise the oldest of all. An output longer than a budget is not kept. A namespace that holds
// anything has a block and tables of its own, which is a lot for one short output, so the budget bounds
// the number of namespaces too. If there are too many, the small one whose newest output is oldest loses
// everything. So a flood of small namespaces does not displace large ones. Evicting takes amortised O(1)
// per token and O(log namespaces) per output.
class SharedTexts {
public:
    SharedTexts(BlockPool& pool, std::size_t budget, std::size_t namespace_budget)
        : pool_(pool), budget_(budget), namespace_budget_(namespace_budget) {}

    std::shared_ptr<Namespace> open(const std::string& name) {
        if (const auto at = by_name_.find(name); at != by_name_.end()) return at->second;
        const auto space = std::make_shared<Namespace>(pool_, name);
        by_name_.emplace(name, space);
        count_tables(*space);
        if (by_name_.size() > max_names_) {
            drop_unused_names();
            max_names_ = std::max<std::size_t>(1024, 2 * by_name_.size());
        }
        return space;
    }

    // The namespace of this name, or null.
    Namespace* find(const std::string& name) {
        const auto at = by_name_.find(name);
        return at == by_name_.end() ? nullptr : at->second.get();
    }

    // Appends an output to the text of its namespace. The caller indexes it before it keeps the next one;
    // that needs no memory. If this throws, the output is not kept, but others may have left for it.
    void keep(const std::shared_ptr<Namespace>& space, std::span<const Token> output, std::int64_t kept_at) {
        if (output.empty() || output.size() > std::min(budget_, namespace_budget_)) return;
        while (space->num_tokens + output.size() > namespace_budget_) evict_oldest(*space);
        while (num_tokens_ + output.size() > budget_) evict_oldest_of_all();
        while (space->kept.empty() && num_spaces_ >= max_spaces()) forget_oldest_small();
        // Entries of evicted outputs are removed once they are the majority.
        if (by_age_.size() > 64 && by_age_.size() > 2 * num_kept_) drop_evicted();
        // What needs memory comes first. An entry of by_age_ without its output counts as evicted.
        make_room(*space, output.size() + 1);
        const std::uint64_t serial = next_serial_++;
        by_age_.push_back({serial, space});
        const std::uint64_t newest_before = space->newest();
        space->kept.push_back({serial, output.size(), space->next_offset, kept_at});
        space->next_offset += output.size() + 1;
        unlist(newest_before);
        num_spaces_ += space->kept.size() == 1;
        space->num_tokens += output.size();
        list_if_small(*space);
        num_tokens_ += output.size();
        ++num_kept_;
        space->text.append(output);
        space->text.close();
    }

    // Changes the budgets and evicts outputs until they hold.
    void resize(std::size_t budget, std::size_t namespace_budget) {
        budget_ = budget;
        namespace_budget_ = namespace_budget;
        for (auto& [name, space] : by_name_) {
            while (space->num_tokens > namespace_budget_) evict_oldest(*space);
        }
        while (num_tokens_ > budget_) evict_oldest_of_all();
        while (num_spaces_ > max_spaces()) forget_oldest_small();
    }

    void flush(Namespace& space) {
        ++space.num_flushes;
        forget(space);
        drop_unused_names();
    }

    void flush_all() {
        for (auto& [name, space] : by_name_) {
            ++space->num_flushes;
            forget(*space);
        }
        drop_unused_names();
    }

    struct Sizes {
        std::size_t num_requests, num_tokens, num_namespaces, num_table_bytes;
    };
    // O(1).
    Sizes sizes() const {
        return {num_kept_, num_tokens_, by_name_.size(), num_table_bytes_};
    }

    // What one namespace holds.
    struct Contents {
        std::string name;
        std::size_t num_outputs, num_tokens, num_bytes;
        std::int64_t oldest, newest;  // when outputs were kept, in seconds since 1970
        std::uint64_t num_drafts;
    };
    // The namespaces that hold something. O(namespaces).
    std::vector<Contents> contents() const {
        std::vector<Contents> found;
        for (const auto& [name, space] : by_name_) {
            if (space->kept.empty()) continue;
            found.push_back({name, space->kept.size(), space->num_tokens,
                             space->text.num_block_bytes() + space->num_table_bytes,
                             space->kept.front().kept_at, space->kept.back().kept_at, space->num_drafts});
        }
        return found;
    }

    // Outputs, the one that was kept first at the front.
    struct Copies {
        std::vector<std::string> names;       // of their namespaces
        std::vector<std::int32_t> spaces;     // a place in names for each output
        std::vector<std::int32_t> lengths;    // of each output
        std::vector<std::int64_t> kept_at;    // of each output, in seconds since 1970
        std::vector<Token> token_ids;         // of all outputs
        std::uint64_t last_serial = 0;        // 0: there are no outputs
    };
    // Copies outputs that were kept after the one of this serial, up to the one that reaches max_tokens.
    Copies copy_after(std::uint64_t serial, std::size_t max_tokens) const {
        Copies copies;
        std::map<const Namespace*, std::int32_t> places;
        auto at = std::ranges::upper_bound(by_age_, serial, {}, &Aged::serial);
        for (; at != by_age_.end() && copies.token_ids.size() < max_tokens; ++at) {
            const Namespace& space = *at->space;
            if (space.kept.empty() || space.kept.front().serial > at->serial) continue;  // evicted
            const auto kept = std::ranges::lower_bound(space.kept, at->serial, {}, &Namespace::Kept::serial);
            const auto [place, is_new] = places.emplace(&space, static_cast<std::int32_t>(places.size()));
            if (is_new) copies.names.push_back(space.name);
            copies.spaces.push_back(place->second);
            copies.lengths.push_back(static_cast<std::int32_t>(kept->num_tokens));
            copies.kept_at.push_back(kept->kept_at);
            const std::size_t num_before = copies.token_ids.size();
            copies.token_ids.resize(num_before + kept->num_tokens);
            space.text.copy(space.text.begin() + static_cast<Position>(kept->offset - space.kept.front().offset),
                            std::span(copies.token_ids).subspan(num_before));
            copies.last_serial = at->serial;
        }
        return copies;
    }

    // Returns what is broken, or null. O(tokens).
    const char* check() const {
        std::size_t num_tokens = 0, num_kept = 0, num_spaces = 0, num_table_bytes = 0;
        for (const auto& [name, space] : by_name_) {
            if (const char* broken = space->text.check()) return broken;
            if (space->num_table_bytes != space->text.num_table_bytes()) return "a text's tables are miscounted";
            num_table_bytes += space->num_table_bytes;
            std::size_t in_space = 0, num_before = 0;
            for (const auto& kept : space->kept) {
                if (kept.offset - space->kept.front().offset != num_before) return "an output lies elsewhere";
                num_before += kept.num_tokens + 1;
                in_space += kept.num_tokens;
            }
            if (in_space != space->num_tokens) return "a namespace's tokens are miscounted";
            if (in_space + space->kept.size() != space->text.size()) return "a text holds more than is kept";
            if (in_space > namespace_budget_) return "a namespace is over its budget";
            num_tokens += in_space;
            num_kept += space->kept.size();
            num_spaces += !space->kept.empty();
            if (is_small(*space) != small_.contains(space->newest())) return "a small namespace is lost";
        }
        if (num_tokens != num_tokens_ || num_kept != num_kept_) return "shared tokens are miscounted";
        if (num_table_bytes != num_table_bytes_) return "the tables are miscounted";
        if (num_spaces != num_spaces_) return "the namespaces that hold something are miscounted";
        if (num_spaces > max_spaces()) return "too many namespaces hold something";
        return num_tokens > budget_ ? "the shared cache is over its budget" : nullptr;
    }

private:
    static bool is_small(const Namespace& space) {
        return !space.kept.empty() && space.num_tokens <= 2 * kTokensPerSpace;
    }
    void list_if_small(Namespace& space) {
        if (!is_small(space)) return;
        space.unused_entry.key() = space.newest();
        small_.insert(std::move(space.unused_entry));
    }
    void unlist(std::uint64_t newest) {
        if (auto entry = small_.extract(newest)) entry.mapped()->unused_entry = std::move(entry);
    }

    struct Aged {
        std::uint64_t serial;
        std::shared_ptr<Namespace> space;
    };

    // A token takes about 35 bytes, so the blocks of so many namespaces take about as much as the budget.
    static constexpr std::size_t kTokensPerSpace = 512;
    std::size_t max_spaces() const { return std::max<std::size_t>(64, budget_ / kTokensPerSpace); }

    void evict_oldest_of_all() {
        const auto [serial, space] = by_age_.front();
        by_age_.pop_front();
        // An output that its own namespace evicted is still listed here.
        if (!space->kept.empty() && space->kept.front().serial == serial) evict_oldest(*space);
    }

    void evict_oldest(Namespace& space) {
        const std::size_t num_tokens = space.kept.front().num_tokens;
        unlist(space.newest());
        space.kept.pop_front();
        space.num_tokens -= num_tokens;
        num_tokens_ -= num_tokens;
        --num_kept_;
        num_spaces_ -= space.kept.empty();
        list_if_small(space);
        if (space.kept.empty()) {
            space.text.clear();
        } else {
            // Only the newest output may wait to be indexed, so the text is indexed up to this place.
            space.text.drop_before(space.text.begin() + static_cast<Position>(num_tokens) + 1);
        }
        count_tables(space);
    }

    // If there are too many namespaces, at least one is small: large ones would exceed the budget.
    void forget_oldest_small() { forget(*small_.begin()->second); }

    void forget(Namespace& space) {
        unlist(space.newest());
        num_tokens_ -= space.num_tokens;
        num_kept_ -= space.kept.size();
        num_spaces_ -= !space.kept.empty();
        space.num_tokens = 0;
        space.kept.clear();
        space.text.clear();
        count_tables(space);
    }

    // After this, appending and indexing so many tokens needs no memory.
    void make_room(Namespace& space, std::size_t num_tokens) {
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

    // To be called after each change of a text.
    void count_tables(Namespace& space) {
        const std::size_t now = space.text.num_table_bytes();
        num_table_bytes_ += now - space.num_table_bytes;  // modulo 2^64 if it shrank
        space.num_table_bytes = now;
    }

    // Removes the entries of evicted outputs from by_age_.
    void drop_evicted() {
        std::erase_if(by_age_, [](const Aged& aged) {
            return aged.space->kept.empty() || aged.space->kept.front().serial > aged.serial;
        });
    }

    // Removes the names of namespaces that no request holds and that hold nothing.
    void drop_unused_names() {
        drop_evicted();
        std::erase_if(by_name_, [this](const auto& entry) {
            const bool is_unused = entry.second.use_count() == 1 && entry.second->kept.empty();
            if (is_unused) num_table_bytes_ -= entry.second->num_table_bytes;
            return is_unused;
        });
    }

    BlockPool& pool_;
    std::size_t budget_, namespace_budget_;
    std::map<std::string, std::shared_ptr<Namespace>> by_name_;
    std::deque<Aged> by_age_;  // oldest first
    std::size_t max_names_ = 1024;  // more names than this trigger a search for unused ones
    std::size_t num_tokens_ = 0, num_kept_ = 0;
    std::size_t num_table_bytes_ = 0;  // of all texts
    std::size_t num_spaces_ = 0;       // namespaces that hold something
    std::map<std::uint64_t, Namespace*> small_;  // the small ones among them, by their newest output
    std::uint64_t next_serial_ = 1;
};

}  // namespace sglang_hvd
