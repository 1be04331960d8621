// The prompts of finished requests. The next turn of a session sends its prompt again, so it stays indexed.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "shared_texts.hpp"
#include "token_text.hpp"

namespace sglang_hvd {

struct SessionKey {
    const Namespace* space;
    std::uint64_t hash;  // of all tokens of the text
    auto operator<=>(const SessionKey&) const = default;
};

struct SessionText {
    std::shared_ptr<Namespace> space;
    std::unique_ptr<TokenText> text;
    SessionKey key;
};

// Keeps indexed prompts within a budget of tokens. The oldest one leaves first.
//
// A prompt is kept without its last tokens, because a chat template ends a prompt differently from how
// it continues it. The kept length is a multiple of kGrain: one pass over a longer prompt yields the
// hashes of all its beginnings of such a length. A prompt can take over only a text that it starts with,
// so no request sees tokens it did not send. Namespaces never see each other's texts.
class SessionTexts {
public:
    using Texts = std::list<SessionText>;

    explicit SessionTexts(std::size_t budget) : budget_(budget) {}

    // Cuts a text to the part of its prompt that is kept, in a list of one; empty if the text is not worth
    // keeping. Touches nothing but the text, and takes time linear in its length.
    Texts prepared(std::shared_ptr<Namespace> space, std::unique_ptr<TokenText> text,
                   std::size_t prompt_len) const {
        const std::size_t length =
            prompt_len < kTemplate ? 0 : (prompt_len - kTemplate) / kGrain * kGrain;
        // If a text is mostly output, the next turn would have to index most of its prompt anyway.
        if (length < kMinTokens || length > budget_ || text->size() > 2 * length) return {};
        text->truncate(static_cast<Position>(length));
        text->index(length);  // the request may have finished before its prompt was indexed
        std::vector<Token> prompt(length);
        text->copy(0, prompt);
        const SessionKey key{space.get(), prefix_hashes(prompt).back()};
        Texts prepared;
        prepared.push_back({std::move(space), std::move(text), key});
        return prepared;
    }

    // Keeps a prepared text. Returns the texts that had to leave, for the caller to free. If it throws, the
    // text is not kept.
    Texts keep(Texts prepared) {
        Texts leaving;
        if (prepared.empty()) return leaving;
        const SessionText& entry = prepared.front();
        if (const auto at = by_key_.find(entry.key); at != by_key_.end()) remove(at->second, leaving);
        while (num_tokens_ + entry.text->size() > budget_) remove(kept_.begin(), leaving);
        by_key_.emplace(entry.key, prepared.begin());
        num_tokens_ += entry.text->size();
        num_table_bytes_ += entry.text->num_table_bytes();
        kept_.splice(kept_.end(), prepared);
        return leaving;
    }

    // Hands over the longest text that the prompt begins with; null if there is none.
    std::unique_ptr<TokenText> take(const Namespace& space, std::span<const Token> prompt) {
        if (prompt.size() < kMinTokens || kept_.empty()) return nullptr;
        const auto hashes = prefix_hashes(prompt);
        for (auto hash = hashes.rbegin(); hash != hashes.rend(); ++hash) {
            const auto at = by_key_.find({&space, *hash});
            if (at == by_key_.end()) continue;
            const TokenText& text = *at->second->text;
            if (text.num_common(prompt) != text.size()) continue;
            Texts taken;
            remove(at->second, taken);
            return std::move(taken.front().text);
        }
        return nullptr;
    }

    // Forgets the texts of one namespace.
    void drop(const Namespace& space) {
        Texts leaving;
        while (true) {
            const auto at = by_key_.lower_bound({&space, 0});
            if (at == by_key_.end() || at->first.space != &space) return;
            remove(at->second, leaving);
        }
    }

    void drop_all() {
        by_key_.clear();
        kept_.clear();
        num_tokens_ = num_table_bytes_ = 0;
    }

    struct Sizes {
        std::size_t num_texts, num_tokens, num_table_bytes;
    };
    Sizes sizes() const {
        return {kept_.size(), num_tokens_, num_table_bytes_};
    }

    // Returns what is broken, or null. O(tokens).
    const char* check() const {
        std::size_t num_tokens = 0, num_table_bytes = 0;
        for (const SessionText& kept : kept_) {
            if (const char* broken = kept.text->check()) return broken;
            num_tokens += kept.text->size();
            num_table_bytes += kept.text->num_table_bytes();
        }
        if (num_tokens != num_tokens_) return "the sessions' tokens are miscounted";
        if (num_table_bytes != num_table_bytes_) return "the sessions' tables are miscounted";
        if (by_key_.size() != kept_.size()) return "a session is lost";
        return num_tokens > budget_ ? "the sessions are over their budget" : nullptr;
    }

private:
    static constexpr std::size_t kGrain = 256;
    static constexpr std::size_t kTemplate = 64;
#ifdef HVD_CHECKED
    static constexpr std::size_t kMinTokens = kGrain;  // so that tests reach it
#else
    static constexpr std::size_t kMinTokens = 1024;  // indexing fewer is fast enough
#endif

    // Needs no memory.
    void remove(Texts::iterator at, Texts& leaving) {
        num_tokens_ -= at->text->size();
        num_table_bytes_ -= at->text->num_table_bytes();
        by_key_.erase(at->key);
        leaving.splice(leaving.end(), kept_, at);
    }

    // Hashes of the first kGrain tokens, the first 2 kGrain, and so on.
    static std::vector<std::uint64_t> prefix_hashes(std::span<const Token> tokens) {
        static const auto factors = [] {
            std::array<std::uint64_t, kGrain> factors;
            std::uint64_t state = 0x9E3779B97F4A7C15u;
            for (auto& factor : factors) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                factor = state | 1;
            }
            return factors;
        }();
        std::vector<std::uint64_t> hashes;
        hashes.reserve(tokens.size() / kGrain);
        std::uint64_t hash = 0;
        for (; tokens.size() >= kGrain; tokens = tokens.subspan(kGrain)) {
            std::uint64_t sum = 0;
            for (std::size_t i = 0; i < kGrain; ++i) {
                sum += factors[i] * (static_cast<std::uint64_t>(tokens[i]) + 1);
            }
            hash = (hash ^ sum ^ (sum >> 29)) * 0xBF58476D1CE4E5B9u;
            hash ^= hash >> 32;
            hashes.push_back(hash);
        }
        return hashes;
    }

    const std::size_t budget_;
    Texts kept_;  // oldest first
    std::map<SessionKey, Texts::iterator> by_key_;
    std::size_t num_tokens_ = 0, num_table_bytes_ = 0;
};

}  // namespace sglang_hvd
