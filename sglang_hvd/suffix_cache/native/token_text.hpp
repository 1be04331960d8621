// A text of tokens, with links from each place to earlier places with the same last tokens.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "block_pool.hpp"
#include "page_allocator.hpp"

namespace sglang_hvd {

using Token = std::int32_t;
using Position = std::uint32_t;

constexpr Token kEnd = -1;  // stands after every finished sequence; no token is negative

// A place is found by this many last tokens. The highest order finds long matches among many occurrences
// of common pairs. Orders 2 and 1 find places if there is no longer match.
constexpr std::array<int, 3> kOrders = {6, 2, 1};
constexpr int kNumOrders = static_cast<int>(kOrders.size());
constexpr int kUnigram = kNumOrders - 1;

constexpr int kLookBack = 32;   // tokens that are compared to measure a match
constexpr int kLookAhead = 64;  // tokens readable after a place: the longest draft

// Mixes the last kOrders[order] tokens before end.
inline std::uint32_t context_hash(const Token* end, int order) {
    auto pair = [end](int distance) {
        std::uint64_t tokens;
        std::memcpy(&tokens, end - distance, sizeof tokens);
        return tokens;
    };
    std::uint64_t h;
    switch (order) {
        case 0:
            h = (pair(2) * 0x9E3779B97F4A7C15u) ^ std::rotl(pair(4) * 0xC2B2AE3D27D4EB4Fu, 17) ^
                std::rotl(pair(6) * 0x165667B19E3779F9u, 41);
            break;
        case 1: h = pair(2); break;
        default: h = static_cast<std::uint32_t>(end[-1]); break;
    }
    h = (h ^ (h >> 32)) * 0xFF51AFD7ED558CCDu;
    return static_cast<std::uint32_t>(h >> 32);
}

// Number of tokens that agree before the two ends, at most max (<= kLookBack).
inline int common_suffix(const Token* a, const Token* b, int max) {
    int length = 0;
    while (length + 2 <= max) {
        std::uint64_t x, y;
        std::memcpy(&x, a - length - 2, sizeof x);
        std::memcpy(&y, b - length - 2, sizeof y);
        if (x != y) return length + ((x ^ y) >> 32 == 0 ? 1 : 0);
        length += 2;
    }
    return length < max && a[-1 - length] == b[-1 - length] ? length + 1 : length;
}

// A growing text that can also lose its oldest tokens.
//
// Tokens stand in blocks. Each block has copies of its neighbours' tokens on both sides, so the kLookBack
// tokens before a place and the kLookAhead tokens from it can be read in one piece. For each order,
// `previous` links a place to the latest earlier place whose last tokens have the same hash bucket, and
// `heads` holds the latest place of each bucket (the structure of LZ77 compressors). A table doubles by
// appending a copy of itself: each half inherits the chains of both, and readers of a chain compare
// tokens anyway. Following a link waits for memory. Chains of single tokens are long, so their latest
// places also stand together.
//
// Appending takes O(1) per token and changes no old token. Dropping the oldest tokens frees their blocks
// and leaves dangling links, which are recognised because they point before begin().
class TokenText {
public:
    explicit TokenText(BlockPool& pool) : pool_(&pool) {
        for (auto& table : heads_) table.assign(kMinHeads, 0);
        recent_.assign(kMinRecents, {});
    }
    TokenText(const TokenText&) = delete;
    TokenText& operator=(const TokenText&) = delete;
    ~TokenText() { release_blocks(first_block_ + blocks_.size()); }

    Position begin() const { return begin_; }
    Position end() const { return end_; }
    std::size_t size() const { return end_ - begin_; }
    // Places before this one can be found.
    Position indexed() const { return indexed_; }
    bool has_backlog() const { return indexed_ != end_; }

    // Allocates the memory that append() needs for so many more tokens.
    void make_room(std::size_t num_tokens) {
        const std::size_t num_blocks =
            (end_ + num_tokens + kBlockTokens - 1) / kBlockTokens - first_block_;
        if (num_blocks > blocks_.capacity()) {
            blocks_.reserve(std::max(num_blocks, 2 * blocks_.size() + 1));
        }
        while (blocks_.size() < num_blocks) {
            blocks_.push_back(static_cast<Block*>(pool_->allocate()));
        }
    }

    // Appends tokens. They can be found once they are indexed. Changes nothing if it throws.
    void append(std::span<const Token> tokens) {
        assert(tokens.size() < kMaxPosition - end_);
        make_room(tokens.size());
        while (!tokens.empty()) {
            const std::size_t offset = end_ % kBlockTokens;
            const std::size_t which = end_ / kBlockTokens - first_block_;
            if (offset == 0) begin_block(which);
            const auto piece = tokens.first(std::min(tokens.size(), kBlockTokens - offset));
            std::copy(piece.begin(), piece.end(), blocks_[which]->at(offset));
            if (offset < kLookAhead && which > 0) {
                const auto ahead = piece.first(std::min(piece.size(), kLookAhead - offset));
                std::copy(ahead.begin(), ahead.end(), blocks_[which - 1]->at(kBlockTokens + offset));
            }
            end_ += static_cast<Position>(piece.size());
            tokens = tokens.subspan(piece.size());
        }
    }

    // Ends the last sequence. No match and no draft crosses this place.
    void close() {
        const Token end = kEnd;
        append({&end, 1});
    }

    // Indexes the next places, at most num_tokens of them.
    void index(std::size_t num_tokens) {
        const Position stop =
            static_cast<Position>(std::min<std::size_t>(end_, indexed_ + num_tokens));
        while (indexed_ < stop) {
            const std::size_t offset = indexed_ % kBlockTokens;
            Block& block = block_at(indexed_);
            const Position block_stop = static_cast<Position>(
                std::min<std::size_t>(stop, indexed_ + (kBlockTokens - offset)));
            grow_heads(block_stop - begin_);
            for (std::size_t i = offset; indexed_ < block_stop; ++i) index_place(block, i);
        }
    }

    // Makes room in the tables for a text of this size, so that index() needs no memory.
    void reserve(std::size_t num_tokens) { grow_heads(num_tokens); }

    // Forgets everything and numbers places from 0 again. Needs no memory.
    void clear() {
        release_blocks(first_block_ + blocks_.size());
        blocks_.shrink_to_fit();
        first_block_ = run_ = 0;
        begin_ = indexed_ = end_ = 0;
        empty_tables(kMinHeads);
    }

    // Forgets all tokens before this place, which must be the start of a sequence and indexed up to there.
    // Needs no memory.
    void drop_before(Position place) {
        assert(begin_ <= place && place <= indexed_);
        begin_ = place;
        release_blocks(place / kBlockTokens);
        shrink_heads();
    }

    // Forgets all tokens from this place on, and restores the tables of a text that ends there. The text
    // must be one sequence of which nothing was dropped. O(1) per token.
    void truncate(Position end) {
        assert(begin_ == 0 && end <= end_);
        while (indexed_ > end) forget_last_place();
        run_ = indexed_;
        end_ = end;
        for (; blocks_.size() * kBlockTokens >= end + kBlockTokens; blocks_.pop_back()) {
            pool_->release(blocks_.back());
        }
    }

    // A pointer from which the kLookBack tokens before a place and up to kLookAhead tokens from it (not
    // beyond end()) can be read. begin() <= place <= end().
    const Token* at(Position place) const {
        // The last token's block always exists.
        if (place == end_) return place == 0 ? nullptr : before_end(place - 1) + 1;
        return before_end(place);
    }
    // The same for place < end().
    const Token* before_end(Position place) const {
        return block_at(place).at(place % kBlockTokens);
    }

    Token token(Position place) const { return place < end_ ? *at(place) : kEnd; }

    // How many tokens from place 0 on equal these. Nothing may have been dropped.
    std::size_t num_common(std::span<const Token> tokens) const {
        assert(begin_ == 0);
        tokens = tokens.first(std::min<std::size_t>(tokens.size(), end_));
        std::size_t num = 0;
        while (num < tokens.size()) {
            const auto piece = tokens.subspan(num, std::min(kBlockTokens, tokens.size() - num));
            const Token* here = before_end(static_cast<Position>(num));
            const auto differs = std::mismatch(piece.begin(), piece.end(), here).first;
            num += static_cast<std::size_t>(differs - piece.begin());
            if (differs != piece.end()) break;
        }
        return num;
    }

    // Copies the tokens from a place on until `to` is full.
    void copy(Position place, std::span<Token> to) const {
        while (!to.empty()) {
            const std::size_t num = std::min(to.size(), kBlockTokens - place % kBlockTokens);
            std::copy_n(at(place), num, to.begin());
            place += static_cast<Position>(num);
            to = to.subspan(num);
        }
    }

    // The latest indexed token whose last kOrders[order] tokens fall into this bucket.
    struct Found {
        bool is_found;
        Position place;
    };
    Found latest(std::uint32_t hash, int order) const {
        Position head;
        if (order == kUnigram) {
            const Recent& recent = recent_[hash & (recent_.size() - 1)];
            head = recent.heads[recent.newest];
        } else {
            head = heads_[order][hash & (heads_[order].size() - 1)];
        }
        return {head > begin_, head - 1};
    }
    // Writes the latest places of a single token, the newest first, at most kNumRecent. Returns how many.
    static constexpr int kNumRecent = 15;
    int recent(std::uint32_t hash, std::span<Position> places) const {
        const Recent& recent = recent_[hash & (recent_.size() - 1)];
        int num = 0;
        for (Position i = 0, at = recent.newest; i < kNumRecent; ++i) {
            const Position head = recent.heads[at];
            if (head <= begin_ || num == static_cast<int>(places.size())) break;
            places[num++] = head - 1;
            at = at == 0 ? kNumRecent - 1 : at - 1;
        }
        return num;
    }
    Found previous(Position place, int order) const {
        const Position distance = block_at(place).previous[order][place % kBlockTokens];
        return {distance != 0 && distance <= place - begin_, place - distance};
    }
    void prefetch_head(std::uint32_t hash, int order) const {
        if (order == kUnigram) {
            __builtin_prefetch(&recent_[hash & (recent_.size() - 1)]);
        } else {
            __builtin_prefetch(&heads_[order][hash & (heads_[order].size() - 1)]);
        }
    }
    // Prefetches the token at a place and its link of this order.
    void prefetch_place(Position place, int order) const {
        const Block& block = block_at(place);
        __builtin_prefetch(block.at(place % kBlockTokens));
        __builtin_prefetch(&block.previous[order][place % kBlockTokens]);
    }

    // Positions are 32 bits wide. Before they run out, all move down by the same amount.
    bool needs_renumbering() const { return end_ > kRenumberAt && begin_ > kRenumberAt / 2; }
    void renumber() {
        const auto shift = static_cast<Position>(begin_ / kBlockTokens * kBlockTokens);
        for (auto& table : heads_) {
            for (Position& head : table) head = head > shift ? head - shift : 0;
        }
        for (Recent& recent : recent_) {
            for (Position& head : recent.heads) head = head > shift ? head - shift : 0;
        }
        first_block_ -= shift / kBlockTokens;
        begin_ -= shift;
        end_ -= shift;
        indexed_ -= shift;
    }

    std::size_t num_block_bytes() const { return blocks_.size() * BlockPool::kBlockBytes; }
    std::size_t num_table_bytes() const {
        std::size_t num_heads = 0;
        for (const auto& table : heads_) num_heads += table.capacity();
        return num_heads * sizeof(Position) + recent_.capacity() * sizeof(Recent) +
               blocks_.capacity() * sizeof(Block*);
    }

    // Checks every link and copy. Returns what is broken, or null. O(size).
    const char* check() const {
        if (begin_ > indexed_ || indexed_ > end_) return "begin, indexed and end out of order";
        if (first_block_ != begin_ / kBlockTokens && size() != 0) return "a dropped block is held";
        for (Position place = begin_; place < indexed_; ++place) {
            const Token* here = at(place);
            for (Position back = 1; back <= kLookBack && back <= place - begin_; ++back)
                if (*(here - back) != *at(place - back)) return "a copied token differs";
            for (Position ahead = 1; ahead < kLookAhead && ahead < end_ - place; ++ahead)
                if (here[ahead] != *at(place + ahead)) return "a copied token differs";
            for (int order = 0; order < kNumOrders; ++order) {
                const Found link = previous(place, order);
                if (link.is_found && (link.place >= place || link.place < begin_))
                    return "a link does not point back into the text";
            }
        }
        for (const auto& table : heads_) {
            if (!std::has_single_bit(table.size())) return "a table's size is no power of 2";
            for (const Position head : table)
                if (head > indexed_) return "a table points past the text";
        }
        if (!std::has_single_bit(recent_.size())) return "a table's size is no power of 2";
        for (const Recent& recent : recent_) {
            if (recent.newest >= kNumRecent) return "the newest place is none";
            Position later = indexed_ + 1;  // the ring goes back in time and ends with empty entries
            for (int i = 0; i < kNumRecent; ++i) {
                const Position head =
                    recent.heads[(recent.newest + kNumRecent - static_cast<Position>(i)) % kNumRecent];
                if (head != 0 && head >= later) return "recent places are out of order";
                later = head;
            }
        }
        return nullptr;
    }

private:
    static constexpr std::size_t kBlockTokens = 928;  // a block's tokens and copies fill one page
    static constexpr std::size_t kMinHeads = 64;
    static constexpr std::size_t kMinRecents = 16;
    // The number of different tokens is bounded, and so is the table that finds single tokens.
    static constexpr std::size_t kMaxRecents = std::size_t{1} << 16;
    static constexpr Position kMaxPosition = std::numeric_limits<Position>::max() - 1;
#ifdef HVD_CHECKED
    static constexpr Position kRenumberAt = Position{1} << 13;  // so that tests reach it
#else
    static constexpr Position kRenumberAt = Position{1} << 31;
#endif

    struct Block {
        Token tokens[kLookBack + kBlockTokens + kLookAhead];
        Position previous[kNumOrders][kBlockTokens];  // distance back; 0: none

        const Token* at(std::size_t offset) const { return tokens + kLookBack + offset; }
        Token* at(std::size_t offset) { return tokens + kLookBack + offset; }
    };
    static_assert(sizeof(Block) <= BlockPool::kBlockBytes);
    static_assert(sizeof(Block::tokens) <= 4096);

    // A ring of the latest places of the tokens in one bucket, each as place + 1; 0: none.
    struct alignas(64) Recent {
        Position newest = 0;
        Position heads[kNumRecent] = {};
    };

    template <typename T>
    using Table = std::vector<T, PageAllocator<T>>;

    Block& block_at(Position place) const {
        return *blocks_[place / kBlockTokens - first_block_];
    }

    void begin_block(std::size_t which) {
        Token* before = blocks_[which]->tokens;
        if (which == 0) {
            std::fill_n(before, kLookBack, kEnd);
        } else {
            std::copy_n(blocks_[which - 1]->at(kBlockTokens - kLookBack), kLookBack, before);
        }
    }

    void release_blocks(std::size_t stop) {
        const std::size_t num_dropped = std::min(stop - first_block_, blocks_.size());
        for (std::size_t i = 0; i < num_dropped; ++i) pool_->release(blocks_[i]);
        blocks_.erase(blocks_.begin(), blocks_.begin() + static_cast<std::ptrdiff_t>(num_dropped));
        first_block_ += num_dropped;
    }

    void index_place(Block& block, std::size_t offset) {
        const Token* end = block.at(offset) + 1;
        run_ = end[-1] == kEnd ? 0 : run_ + 1;
        for (int order = 0; order < kNumOrders; ++order) {
            Position distance = 0;
            if (run_ >= static_cast<std::size_t>(kOrders[order])) {
                const std::uint32_t hash = context_hash(end, order);
                const Found latest = this->latest(hash, order);
                if (latest.is_found) distance = indexed_ - latest.place;
                remember(hash, order);
            }
            block.previous[order][offset] = distance;
        }
        ++indexed_;
    }

    void remember(std::uint32_t hash, int order) {
        if (order == kUnigram) {
            Recent& recent = recent_[hash & (recent_.size() - 1)];
            recent.newest = recent.newest == kNumRecent - 1 ? 0 : recent.newest + 1;
            recent.heads[recent.newest] = indexed_ + 1;
        } else {
            heads_[order][hash & (heads_[order].size() - 1)] = indexed_ + 1;
        }
    }

    // Undoes the latest index_place.
    void forget_last_place() {
        const Position place = --indexed_, head = place + 1;
        const Token* end = before_end(place) + 1;
        // The tables had at least this size then. What they held was copied as they grew.
        const std::size_t num_heads = wanted_heads(place + 1);
        for (int order = 0; order < kUnigram; ++order) {
            if (head < static_cast<Position>(kOrders[order])) continue;
            const Found before = previous(place, order);
            auto& table = heads_[order];
            for (std::size_t at = context_hash(end, order) & (num_heads - 1); at < table.size();
                 at += num_heads) {
                if (table[at] == head) table[at] = before.is_found ? before.place + 1 : 0;
            }
        }
        const std::size_t num_recents = wanted_recents(num_heads);
        for (std::size_t at = context_hash(end, kUnigram) & (num_recents - 1); at < recent_.size();
             at += num_recents) {
            Recent& recent = recent_[at];
            if (recent.heads[recent.newest] != head) continue;
            // Its slot receives the place before the oldest one that is left.
            const Position oldest = recent.heads[(recent.newest + 1) % kNumRecent];
            const Found before = oldest == 0 ? Found{} : previous(oldest - 1, kUnigram);
            recent.heads[recent.newest] = before.is_found ? before.place + 1 : 0;
            recent.newest = recent.newest == 0 ? kNumRecent - 1 : recent.newest - 1;
        }
    }

    static std::size_t wanted_recents(std::size_t num_heads) {
        return std::clamp(num_heads / 8, kMinRecents, kMaxRecents);
    }

    static std::size_t wanted_heads(std::size_t num_tokens) {
        return std::bit_ceil(std::max(num_tokens, kMinHeads));
    }

    void grow_heads(std::size_t num_tokens) {
        const std::size_t wanted = wanted_heads(num_tokens);
        for (auto& table : heads_) grow(table, wanted);
        grow(recent_, wanted_recents(wanted));
    }

    template <typename T>
    static void grow(Table<T>& table, std::size_t wanted) {
        if (table.size() >= wanted) return;
        table.reserve(wanted);
        while (table.size() < wanted) {
            const std::size_t half = table.size();
            table.resize(2 * half);
            std::copy_n(table.begin(), half, table.begin() + static_cast<std::ptrdiff_t>(half));
        }
    }

    // The tables are rebuilt once 7/8 of what they were made for is gone: amortised O(1) per dropped token.
    void shrink_heads() {
        if (wanted_heads(size()) * 8 > heads_[0].size()) return;
        empty_tables(wanted_heads(size()));
        indexed_ = begin_;
        run_ = 0;
        index(size());
    }

    // num_heads: at most the present size. A table that cannot move to less memory stays where it is.
    void empty_tables(std::size_t num_heads) {
        for (auto& table : heads_) {
            table.assign(num_heads, 0);
            table.shrink_to_fit();
        }
        recent_.assign(wanted_recents(num_heads), {});
        recent_.shrink_to_fit();
    }

    BlockPool* pool_;
    std::vector<Block*> blocks_;  // may include blocks that hold no token yet
    std::size_t first_block_ = 0;  // number of blocks dropped before blocks_[0]
    Position begin_ = 0, indexed_ = 0, end_ = 0;
    std::size_t run_ = 0;  // indexed tokens of the last sequence
    std::array<Table<Position>, kUnigram> heads_;  // place + 1; 0: none
    Table<Recent> recent_;
};

}  // namespace sglang_hvd
