// The suffix cache: active requests, the texts of finished ones, and the thread that indexes.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "block_pool.hpp"
#include "paper_draft.hpp"
#include "session_texts.hpp"
#include "shared_texts.hpp"
#include "token_text.hpp"
#include "votes_draft.hpp"

namespace sglang_hvd {

struct CacheSettings {
    std::size_t shared_tokens = 100'000;     // budget of all namespaces together
    std::size_t namespace_tokens = 100'000;  // budget of one
    std::size_t session_tokens = 0;          // budget of the texts kept for the next turn
    bool indexes_in_background = true;
    bool is_deterministic = false;  // equal calls give equal drafts: see the thread rule
    float min_token_prob = 0.f;
    std::optional<PaperSettings> paper;  // drafts as in the paper instead of the best ones
};

// Thread rule. One thread calls the methods (SGLang's scheduler); copy_after() alone may be called from any
// thread, and lets the others go first. The cache has one thread of its own,
// the indexing thread, for long work: it indexes texts of more than kInlineTokens, keeps what finished
// requests leave, and frees memory. One mutex guards everything but the pool of blocks, which has its
// own. A method holds the mutex until it returns. The indexing thread holds it for kPieceTokens at a time
// and lets a waiting method go first. It holds it longer, in time linear in the text, only when a text's
// tables double or shrink to an eighth, or when outputs are evicted.
//
// So timing decides which tokens are indexed when a draft is proposed. It also decides the size of the
// tables when a token is indexed, and with it what is found. Where equal calls must give equal drafts (the
// ranks of one tensor-parallel group), set is_deterministic: each call that reads or changes texts then first
// waits until the indexing thread has finished.
//
// A method that throws std::bad_alloc has changed nothing, except that outputs and session texts may have
// left to make room.
class CacheCore {
public:
    using Slot = std::int32_t;  // place of an active request; used again after it finished

    explicit CacheCore(const CacheSettings& settings)
        : settings_(settings),
          shared_(pool_, settings.shared_tokens, settings.namespace_tokens),
          sessions_(settings.session_tokens) {
        if (settings.paper) settings_.indexes_in_background = false;
    }
    CacheCore(const CacheCore&) = delete;
    CacheCore& operator=(const CacheCore&) = delete;
    ~CacheCore() {
        {
            const auto lock = lock_first();
            is_stopping_ = true;
        }
        tasks_changed_.notify_all();
        if (worker_.joinable()) worker_.join();
    }

    Slot start(const std::string& space, std::span<const Token> prompt) {
        require_tokens(prompt);
        const auto lock = lock_texts();
        auto request = std::make_shared<Request>(shared_.open(space));
        request->text = text_with(*request->space, prompt);
        TokenText& text = *request->text;
        request->prompt_end = text.end();
        const std::size_t backlog = text.end() - text.indexed();
        std::list<Task> task;
        if (!settings_.indexes_in_background || backlog <= kInlineTokens) {
            text.reserve(text.size());
            text.index(backlog);
        } else {
            start_worker();
            task.emplace_back(request);
        }
        if (free_slots_.empty()) {
            if (requests_.size() == requests_.capacity()) requests_.reserve(2 * requests_.size() + 1);
            free_slots_.reserve(requests_.capacity());  // finish() must not fail there
            requests_.emplace_back();
            free_slots_.push_back(static_cast<Slot>(requests_.size() - 1));
        }
        if (!task.empty()) add_task(std::move(task));
        const Slot slot = free_slots_.back();
        free_slots_.pop_back();
        requests_[static_cast<std::size_t>(slot)] = std::move(request);
        return slot;
    }

    // Whether the slot belongs to an active request.
    bool has(Slot slot) const {
        const auto place = static_cast<std::size_t>(slot);
        return slot >= 0 && place < requests_.size() && requests_[place] != nullptr;
    }

    // Appends the first lengths[i] tokens of row i to request slots[i]. Changes nothing if it
    // throws.
    void commit(std::span<const Slot> slots, const Token* rows, std::size_t width,
                std::span<const std::int32_t> lengths) {
        const auto lock = lock_texts();
        for (std::size_t i = 0; i < slots.size(); ++i) {
            at(slots[i]);
            if (lengths[i] < 0 || static_cast<std::size_t>(lengths[i]) > width) {
                throw std::invalid_argument("lengths[" + std::to_string(i) + "] is " +
                                            std::to_string(lengths[i]) + ": must lie in 0.." +
                                            std::to_string(width));
            }
            require_tokens({rows + i * width, static_cast<std::size_t>(lengths[i])});
        }
        for (std::size_t i = 0; i < slots.size(); ++i) {
            TokenText& text = *at(slots[i]).text;
            const auto num_tokens = static_cast<std::size_t>(lengths[i]);
            text.make_room(num_tokens);
            // The indexing thread makes room in the tables for what it indexes.
            if (!text.has_backlog()) text.reserve(text.size() + num_tokens);
        }
        for (std::size_t i = 0; i < slots.size(); ++i) {
            TokenText& text = *at(slots[i]).text;
            const std::span tokens(rows + i * width, static_cast<std::size_t>(lengths[i]));
            const bool has_backlog = text.has_backlog();
            text.append(tokens);
            if (!has_backlog) text.index(tokens.size());
        }
    }

    // Fills one draft for each slot, with at most max_nodes[i] nodes and no more than a row has room for.
    // by_votes: the drafts by vote, even if the settings ask for the paper's. with_evidence: also fills the
    // evidence of chains.
    void propose(std::span<const Slot> slots, DraftShape shape, bool by_votes, bool with_evidence,
                 std::span<const std::int32_t> max_nodes, const DraftRows& out) {
        const auto lock = lock_texts();
        for (const Slot slot : slots) at(slot);
        for (std::size_t i = 0; i < slots.size(); ++i) {
            const Request& request = at(slots[i]);
            const int max = std::min(max_nodes[i], static_cast<std::int32_t>(out.width));
            const TokenText* shared = &request.space->text;
            if (shared->size() == 0) shared = nullptr;
            const std::size_t first = i * out.width;
            Draft draft{{out.token_ids + first, out.width}, {out.parents + first, out.width},
                        {out.depths + first, out.width}, {out.probs + first, out.width}, 0, {}, {}};
            const bool is_papers = settings_.paper && !by_votes;
            if (is_papers) {
                propose_as_paper(request, max, draft);
            } else {
                votes_proposer_.propose({request.text.get(), request.prompt_end, shared}, shape, max,
                                        settings_.min_token_prob, draft);
            }
            // Each proposal of a step asks for one chain by the settings; trees and second opinions come
            // on top.
            request.space->num_drafts += shape == DraftShape::kChain && !by_votes && draft.num_nodes > 0 &&
                                         draft.match.is_from(MatchOrigin::kShared);
            if (with_evidence && shape == DraftShape::kChain && draft.num_nodes > 0) {
                if (!is_papers) {
                    votes_proposer_.compare_with_source(draft.evidence);
                    votes_proposer_.tell_others(draft.evidence);
                }
                look_up_tokens(*request.text, draft.token_ids.first(static_cast<std::size_t>(draft.num_nodes)),
                               draft.evidence);
            }
            out.num_nodes[i] = draft.num_nodes;
            std::memcpy(out.matches + i * kMatchColumns, &draft.match, sizeof(Match));
            if (with_evidence)
                std::memcpy(out.evidence + i * kEvidenceColumns, &draft.evidence, sizeof(DraftEvidence));
        }
    }

    // Forgets a request. keeps: its output (the given one, otherwise what was committed) is shared.
    void finish(Slot slot, bool keeps, std::optional<std::span<const Token>> output) {
        if (output) require_tokens(*output);
        const bool is_in_background = settings_.indexes_in_background;
        const auto lock = lock_texts();
        Request& request = at(slot);
        // What may fail comes before the request leaves the table.
        if (is_in_background) start_worker();
        std::list<Task> task;
        auto& finished = std::get<Finished>(task.emplace_back(Finished{}));
        finished.space = request.space;
        finished.is_kept = keeps;
        finished.num_flushes_seen = request.space->num_flushes;
        finished.kept_at = std::time(nullptr);
        if (keeps) {
            finished.output = output_of(request, output);
            if (!is_in_background) {
                keep_now(finished);
            }
        }
        finished.text = std::move(request.text);
        finished.prompt_end = request.prompt_end;
        requests_[static_cast<std::size_t>(slot)] = nullptr;
        free_slots_.push_back(slot);
        if (!is_in_background) {
            if (keeps) keep_session(session_of(finished));
        } else if (keeps || finished.text->size() > kInlineTokens) {
            num_waiting_tokens_ += finished.output.size();
            add_task(std::move(task));
        }
    }

    // Shares outputs of a namespace, oldest first, as if requests had finished with them. The first
    // lengths[0] tokens are the first output's. Without an indexing thread, an add() that throws
    // std::bad_alloc may have shared some.
    void add(const std::string& name, std::span<const Token> token_ids,
             std::span<const std::int32_t> lengths, std::span<const std::int64_t> kept_at) {
        require_tokens(token_ids);
        std::size_t num_tokens = 0;
        for (const std::int32_t length : lengths) {
            if (length < 0) throw std::invalid_argument("a length is negative");
            num_tokens += static_cast<std::size_t>(length);
        }
        if (num_tokens != token_ids.size() || lengths.size() != kept_at.size()) {
            throw std::invalid_argument("lengths, kept_at and token_ids do not fit each other");
        }
        const bool is_in_background = settings_.indexes_in_background;
        const auto lock = lock_texts();
        if (is_in_background) start_worker();
        const auto space = shared_.open(name);
        std::list<Task> tasks;
        for (std::size_t i = 0; i < lengths.size(); ++i) {
            const auto output = token_ids.first(static_cast<std::size_t>(lengths[i]));
            token_ids = token_ids.subspan(output.size());
            Finished added;
            added.space = space;
            added.is_kept = true;
            added.num_flushes_seen = space->num_flushes;
            added.kept_at = kept_at[i];
            added.output.assign(output.begin(), output.end());
            if (is_in_background) {
                tasks.emplace_back(std::move(added));
            } else {
                keep_now(added);
            }
        }
        if (!is_in_background) return;
        num_waiting_tokens_ += num_tokens;
        add_task(std::move(tasks));
    }

    // See SharedTexts::copy_after. Outputs that wait to be indexed are not copied.
    SharedTexts::Copies copy_after(std::uint64_t serial, std::size_t max_tokens) const {
        const auto lock = lock_last();
        return shared_.copy_after(serial, max_tokens);
    }

    std::vector<SharedTexts::Contents> contents() const {
        const auto lock = lock_first();
        return shared_.contents();
    }

    void flush(const std::string& name) {
        const auto lock = lock_texts();
        Namespace* space = shared_.find(name);
        if (!space) return;
        sessions_.drop(*space);
        shared_.flush(*space);
    }
    void resize(std::size_t shared_tokens, std::size_t namespace_tokens) {
        const auto lock = lock_texts();
        shared_.resize(shared_tokens, namespace_tokens);
    }
    void flush_all() {
        const auto lock = lock_texts();
        sessions_.drop_all();
        shared_.flush_all();
    }

    // Waits until everything handed in is indexed.
    void drain() {
        auto lock = lock_first();
        wait_for_worker(lock);
    }

    struct Stats {
        std::size_t num_requests, num_request_tokens, num_shared_requests, num_shared_tokens,
            num_namespaces, num_sessions, num_session_tokens, num_pending_tokens, num_bytes;
    };
    Stats stats() const {
        const auto lock = lock_first();
        const auto shared = shared_.sizes();
        const auto sessions = sessions_.sizes();
        Stats stats{0, 0, shared.num_requests, shared.num_tokens, shared.num_namespaces,
                    sessions.num_texts, sessions.num_tokens, num_waiting_tokens_,
                    pool_.num_bytes() + shared.num_table_bytes + sessions.num_table_bytes};
        for (const auto& request : requests_) {
            if (!request) continue;
            ++stats.num_requests;
            stats.num_request_tokens += request->text->size();
            stats.num_pending_tokens += request->text->end() - request->text->indexed();
            stats.num_bytes += request->text->num_table_bytes();
        }
        return stats;
    }

    // Returns what is broken in the structures, or null. O(tokens).
    const char* check() const {
        const auto lock = lock_first();
        if (const char* broken = shared_.check()) return broken;
        if (const char* broken = sessions_.check()) return broken;
        std::size_t num_active = 0;
        for (const auto& request : requests_) {
            if (!request) continue;
            ++num_active;
            if (const char* broken = request->text->check()) return broken;
            if (request->prompt_end > request->text->end()) return "a prompt is longer than its text";
        }
        if (num_active + free_slots_.size() != requests_.size()) return "a slot is lost";
        return nullptr;
    }

private:
    static constexpr std::size_t kInlineTokens = 512;
    static constexpr std::size_t kPieceTokens = 256;  // indexed in about 20 us

    struct Request {
        explicit Request(std::shared_ptr<Namespace> space) : space(std::move(space)) {}

        std::unique_ptr<TokenText> text;  // null after the request finished
        std::shared_ptr<Namespace> space;
        Position prompt_end = 0;
    };
    struct Finished {
        std::shared_ptr<Namespace> space;
        bool is_kept = false;
        std::uint64_t num_flushes_seen = 0;
        std::int64_t kept_at = 0;
        std::vector<Token> output;
        // Freed by the indexing thread: many blocks take a while. Null for an output without a request.
        std::unique_ptr<TokenText> text;
        Position prompt_end = 0;
    };
    using Task = std::variant<std::shared_ptr<Request>, Finished>;

    // ---- the calling thread ----

    // Goes before the indexing thread's next piece: the mutex alone would return to that thread first.
    std::unique_lock<std::mutex> lock_first() const {
        is_caller_waiting_.store(true, std::memory_order_relaxed);
        std::unique_lock lock(mutex_);
        is_caller_waiting_.store(false, std::memory_order_relaxed);
        return lock;
    }

    // For a call that reads or changes texts.
    std::unique_lock<std::mutex> lock_texts() {
        auto lock = lock_first();
        if (settings_.is_deterministic) wait_for_worker(lock);
        return lock;
    }

    void wait_for_worker(std::unique_lock<std::mutex>& lock) {
        tasks_changed_.wait(lock, [this] { return tasks_.empty() && !is_working_; });
    }

    // A text of this prompt: the one of the turn before, if it is kept, and what is new.
    std::unique_ptr<TokenText> text_with(const Namespace& space, std::span<const Token> prompt) {
        auto text = sessions_.take(space, prompt);
        if (!text) text = std::make_unique<TokenText>(pool_);
        text->append(prompt.subspan(text->size()));
        return text;
    }

    static void require_tokens(std::span<const Token> tokens) {
        Token min = 0;
        for (const Token token : tokens) min = std::min(min, token);
        if (min < 0) {
            throw std::invalid_argument("token ids must not be negative, got " + std::to_string(min));
        }
        if (tokens.size() > std::size_t{1} << 30) {
            throw std::invalid_argument("at most 2**30 tokens at once");
        }
    }

    Request& at(Slot slot) const {
        if (!has(slot)) throw std::invalid_argument("slot " + std::to_string(slot) + " holds no active request");
        return *requests_[static_cast<std::size_t>(slot)];
    }

    void propose_as_paper(const Request& request, int max, Draft& draft) {
        draft.num_nodes = 0;
        draft.match = {};
        const PaperSettings& settings = *settings_.paper;
        const auto context = PaperProposer::context_of(settings, *request.text);
        const auto own = paper_proposer_.propose(settings, *request.text, context, max);
        const auto shared = paper_proposer_.propose(settings, request.space->text, context, max);
        const bool is_own = own && (!shared || own->score >= shared->score);
        if (!own && !shared) return;
        const PaperDraft& best = is_own ? *own : *shared;
        for (std::size_t i = 0; i < best.token_ids.size(); ++i) {
            draft.token_ids[i] = best.token_ids[i];
            draft.probs[i] = best.probs[i];
            draft.parents[i] = static_cast<std::int32_t>(i) - 1;
            draft.depths[i] = static_cast<std::int32_t>(i) + 1;
        }
        draft.num_nodes = static_cast<int>(best.token_ids.size());
        draft.match.match_len = static_cast<float>(best.match_len);
        draft.match.score = best.score;
        draft.match.num_tokens = static_cast<float>(draft.num_nodes);
        draft.match.origin = static_cast<float>(is_own ? MatchOrigin::kOutput : MatchOrigin::kShared);
        draft.match.num_occurrences = static_cast<float>(best.num_occurrences);
        draft.match.num_agreeing = static_cast<float>(best.num_agreeing);
    }

    static std::vector<Token> output_of(const Request& request,
                                        std::optional<std::span<const Token>> given) {
        if (given) return {given->begin(), given->end()};
        std::vector<Token> output(request.text->end() - request.prompt_end);
        request.text->copy(request.prompt_end, output);
        return output;
    }

    void keep_now(const Finished& finished) {
        shared_.keep(finished.space, finished.output, finished.kept_at);
        finished.space->text.index(finished.output.size() + 1);
    }

    // Not before it is needed: until then the process may be forked.
    void start_worker() {
        if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
    }

    // Needs no memory.
    void add_task(std::list<Task> tasks) {
        tasks_.splice(tasks_.end(), tasks);
        tasks_changed_.notify_all();
    }

    // ---- the indexing thread; without it, the calling thread ----

    // What a finished request leaves to the next turn of its session.
    SessionTexts::Texts session_of(Finished& finished) const {
        if (!finished.text) return {};
        try {
            return sessions_.prepared(finished.space, std::move(finished.text), finished.prompt_end);
        } catch (const std::bad_alloc&) {
            return {};  // the next turn has to index its prompt again
        }
    }
    SessionTexts::Texts keep_session(SessionTexts::Texts prepared) {
        try {
            return sessions_.keep(std::move(prepared));
        } catch (const std::bad_alloc&) {
            return {};  // likewise
        }
    }

    // ---- the indexing thread ----

    // For one piece of work.
    std::unique_lock<std::mutex> lock_last() const {
        while (is_caller_waiting_.load(std::memory_order_relaxed)) std::this_thread::yield();
        return std::unique_lock(mutex_);
    }

    void work() {
        std::unique_lock lock(mutex_);
        while (true) {
            tasks_changed_.wait(lock, [this] { return is_stopping_ || !tasks_.empty(); });
            if (is_stopping_) return;
            std::list<Task> task;
            task.splice(task.end(), tasks_, tasks_.begin());
            is_working_ = true;
            lock.unlock();
            bool is_done = true;
            if (auto* request = std::get_if<std::shared_ptr<Request>>(&task.front())) {
                is_done = index_some(**request);
            } else {
                settle(std::get<Finished>(task.front()));
            }
            if (is_done) task.clear();
            lock = lock_last();
            tasks_.splice(tasks_.end(), task);  // an unfinished task waits for its next turn
            is_working_ = false;
            if (tasks_.empty()) tasks_changed_.notify_all();
        }
    }

    // Returns whether nothing is left to do.
    bool index_some(Request& request) {
        constexpr int kPiecesPerTurn = 64;
        for (int piece = 0; piece < kPiecesPerTurn; ++piece) {
            const auto lock = lock_last();
            if (!request.text) return true;  // the request has finished
            TokenText& text = *request.text;
            if (text.indexed() == 0) text.reserve(text.size());
            text.index(kPieceTokens);
            if (!text.has_backlog()) return true;
        }
        return false;
    }

    // Keeps what a finished request leaves to other requests and to the next turn of its session, unless
    // its namespace was flushed meanwhile.
    void settle(Finished& finished) {
        if (!finished.is_kept) return;
        const Namespace& space = *finished.space;
        {
            const auto lock = lock_last();
            if (space.num_flushes == finished.num_flushes_seen) {
                shared_.keep(finished.space, finished.output, finished.kept_at);
            }
        }
        for (bool is_indexed = false; !is_indexed;) {
            const auto lock = lock_last();
            finished.space->text.index(kPieceTokens);
            is_indexed = !space.text.has_backlog();
        }
        SessionTexts::Texts prepared = session_of(finished), leaving;  // freed without the mutex
        const auto lock = lock_last();
        if (space.num_flushes == finished.num_flushes_seen) leaving = keep_session(std::move(prepared));
        num_waiting_tokens_ -= finished.output.size();
    }

    CacheSettings settings_;
    VotesProposer votes_proposer_;
    PaperProposer paper_proposer_;
    BlockPool pool_;

    mutable std::atomic<bool> is_caller_waiting_ = false;
    mutable std::mutex mutex_;  // guards what follows, and all texts
    SharedTexts shared_;
    SessionTexts sessions_;
    std::vector<std::shared_ptr<Request>> requests_;  // by slot; null where it is free
    std::vector<Slot> free_slots_;
    std::condition_variable tasks_changed_;
    std::list<Task> tasks_;
    std::size_t num_waiting_tokens_ = 0;  // of outputs among the tasks
    bool is_working_ = false, is_stopping_ = false;
    std::thread worker_;
};

}  // namespace sglang_hvd
