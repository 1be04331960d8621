// The prompts of finished requests, for the next turn of their session, which sends them again.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "shared_texts.hpp"
#include "token_text.hpp"

namespace sglang_hvd {

// Keeps indexed prompts within a budget of tokens; the one that was kept first leaves first.
//
// A prompt is kept without its last tokens: templates end a prompt in another way than they
// continue it, and prompts of a round length can be found by a hash, of which one pass gives those
// of all beginnings of a longer one. Who takes a text out begins with the same tokens, so he reads
// nothing that he did not send. Namespaces never see each other's. Thread-safe.
class SessionTexts {
public:
    explicit SessionTexts(std::size_t budget) : budget_(budget) {}

    using Texts = std::vector<std::unique_ptr<TokenText>>;

    // Keeps what a text has of its prompt. num_flushes: of the namespace so far. Returns what had
    // to leave, or was not worth keeping, for the caller to free. If it throws, the text is gone.
    Texts keep(std::shared_ptr<Namespace> space, std::uint64_t num_flushes,
               std::unique_ptr<TokenText> text, std::size_t prompt_len) {
        Texts leaving;
        const std::size_t length =
            prompt_len < kTemplate ? 0 : (prompt_len - kTemplate) / kGrain * kGrain;
        // Of a text that is mostly output, the next turn would have to index the most anyhow.
        if (length < kLeastTokens || length > budget_ || text->size() > 2 * length) {
            leaving.push_back(std::move(text));
            return leaving;
        }
        text->truncate(static_cast<Position>(length));
        text->index(length);  // if it finished before all of it was
        std::vector<Token> prompt(length);
        text->copy(0, prompt);
        const Key key{space.get(), prefix_hashes(prompt).back()};
        std::list<Kept> entry;
        entry.push_back({std::move(space), num_flushes, std::move(text), key});
        const std::lock_guard lock(mutex_);
        if (const auto at = by_key_.find(key); at != by_key_.end()) {
            leaving.push_back(remove(at->second));
        }
        while (num_tokens_ + length > budget_) leaving.push_back(remove(kept_.begin()));
        by_key_.emplace(key, entry.begin());
        num_tokens_ += length;
        num_table_bytes_ += entry.front().text->num_table_bytes();
        kept_.splice(kept_.end(), entry);
        return leaving;
    }

    // Takes out the longest text that the prompt begins with; null: there is none.
    std::unique_ptr<TokenText> take(const Namespace& space, std::uint64_t num_flushes,
                                    std::span<const Token> prompt) {
        if (prompt.size() < kLeastTokens) return nullptr;
        const std::lock_guard lock(mutex_);
        if (kept_.empty()) return nullptr;
        const auto hashes = prefix_hashes(prompt);
        for (auto hash = hashes.rbegin(); hash != hashes.rend(); ++hash) {
            const auto at = by_key_.find({&space, *hash});
            if (at == by_key_.end() || at->second->num_flushes != num_flushes) continue;
            const TokenText& text = *at->second->text;
            if (text.num_common(prompt) == text.size()) return remove(at->second);
        }
        return nullptr;
    }

    // Gives up all texts for which this is true of their namespace and its number of flushes.
    template <typename Condition>
    Texts drop_if(Condition condition) {
        const std::lock_guard lock(mutex_);
        Texts leaving;
        for (auto at = kept_.begin(); at != kept_.end();) {
            const auto next = std::next(at);
            if (condition(*at->space, at->num_flushes)) leaving.push_back(remove(at));
            at = next;
        }
        return leaving;
    }

    struct Sizes {
        std::size_t num_texts, num_tokens, num_table_bytes;
    };
    Sizes sizes() const {
        const std::lock_guard lock(mutex_);
        return {kept_.size(), num_tokens_, num_table_bytes_};
    }

    const char* check() const {
        const std::lock_guard lock(mutex_);
        std::size_t num_tokens = 0, num_table_bytes = 0;
        for (const Kept& kept : kept_) {
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
    static constexpr std::size_t kLeastTokens = kGrain;  // so that tests get there
#else
    static constexpr std::size_t kLeastTokens = 1024;  // indexing less takes no time
#endif

    struct Key {
        const Namespace* space;
        std::uint64_t hash;
        auto operator<=>(const Key&) const = default;
    };
    struct Kept {
        std::shared_ptr<Namespace> space;
        std::uint64_t num_flushes;
        std::unique_ptr<TokenText> text;
        Key key;
    };
    using Place = std::list<Kept>::iterator;

    std::unique_ptr<TokenText> remove(Place at) {
        auto text = std::move(at->text);
        num_tokens_ -= text->size();
        num_table_bytes_ -= text->num_table_bytes();
        by_key_.erase(at->key);
        kept_.erase(at);
        return text;
    }

    // Of the first kGrain tokens, the first 2 kGrain, and so on.
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
    mutable std::mutex mutex_;  // taken before SharedTexts' names_mutex_
    std::list<Kept> kept_;      // oldest first
    std::map<Key, Place> by_key_;
    std::size_t num_tokens_ = 0, num_table_bytes_ = 0;
};

}  // namespace sglang_hvd
