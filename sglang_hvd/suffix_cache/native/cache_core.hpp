// The suffix cache: active requests, what finished ones left, and the thread that indexes.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "block_pool.hpp"
#include "paper_draft.hpp"
#include "proposer.hpp"
#include "session_texts.hpp"
#include "shared_texts.hpp"
#include "token_text.hpp"

namespace sglang_hvd {

struct CacheSettings {
    std::size_t shared_tokens = 100'000;     // budget of all namespaces together
    std::size_t namespace_tokens = 100'000;  // budget of one
    std::size_t session_tokens = 0;          // budget of the texts kept for the next turn
    bool indexes_in_background = true;
    float min_token_prob = 0.f;
    std::optional<PaperSettings> paper;  // drafts as in the paper instead of the best ones
};

// Thread rule: every method may be called from any thread. propose and commit run beside each
// other; two calls that name the same request take turns. start and finish wait for the propose and
// commit calls under way. Long work (indexing what is longer than kInlineTokens, giving
// memory back) is left to one thread of the cache's own. It holds a lock for the time of
// kPieceTokens, and lets those pass that wait for it; but longer, in time linear in the text, when a
// text's tables double or shrink to an eighth.
//
// Which tokens are indexed when a draft is proposed then depends on timing, and so does the size of
// the tables when a token is indexed, which decides what is found. Where equal calls must give equal
// drafts (the ranks of one tensor-parallel group), set indexes_in_background to false or call
// drain() before every other call.
class CacheCore {
public:
    using Slot = std::int32_t;  // of an active request

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
            const std::lock_guard lock(tasks_mutex_);
            is_stopping_ = true;
        }
        tasks_changed_.notify_all();
        if (worker_.joinable()) worker_.join();
    }

    // Where memory cannot be had, a method has changed nothing, except that outputs and texts of sessions
    // may have left which it needed.

    Slot start(const std::string& space, std::span<const Token> prompt) {
        require_tokens(prompt);
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
        const std::lock_guard lock(requests_mutex_);
        if (free_slots_.empty()) {
            if (requests_.size() == kMaxRequests) throw std::invalid_argument("too many requests");
            if (requests_.size() == requests_.capacity()) requests_.reserve(2 * requests_.size() + 1);
            free_slots_.reserve(requests_.capacity());  // finish() must not fail there
            requests_.emplace_back();
            free_slots_.push_back(static_cast<Slot>(requests_.size() - 1));
        }
        if (!task.empty()) add_task(std::move(task));
        const Slot slot = free_slots_.back();
        free_slots_.pop_back();
        request->slot = slot;
        requests_[place_of(slot)] = std::move(request);
        return slot;
    }

    // Appends the first lengths[i] tokens of row i to request slots[i]. Changes nothing if it
    // throws.
    void commit(std::span<const Slot> slots, const Token* rows, std::size_t width,
                std::span<const std::int32_t> lengths) {
        const std::shared_lock lock(requests_mutex_);
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
            Request& request = at(slots[i]);
            const auto num_tokens = static_cast<std::size_t>(lengths[i]);
            const auto turn = turn_of(request);
            request.text->make_room(num_tokens);
            // What the thread indexes it makes room for.
            if (!request.text->has_backlog()) request.text->reserve(request.text->size() + num_tokens);
        }
        for (std::size_t i = 0; i < slots.size(); ++i) {
            Request& request = at(slots[i]);
            const std::span tokens(rows + i * width, static_cast<std::size_t>(lengths[i]));
            const auto turn = turn_of(request);
            const bool has_backlog = request.text->has_backlog();
            request.text->append(tokens);
            if (!has_backlog) request.text->index(tokens.size());
        }
    }

    // Fills one draft for each slot, at most max_nodes[i] nodes of it. by_votes: the best drafts,
    // even where the settings ask for the paper's. with_evidence: of chains.
    void propose(std::span<const Slot> slots, DraftShape shape, bool by_votes, bool with_evidence,
                 std::span<const std::int32_t> max_nodes, std::span<Draft> drafts) {
        thread_local Proposer reused;
        Proposer& proposer = reused;
        const std::shared_lock lock(requests_mutex_);
        for (const Slot slot : slots) at(slot);
        const Namespace* space = nullptr;
        std::shared_lock<std::shared_mutex> read;  // held from one request to the next
        for (std::size_t i = 0; i < slots.size(); ++i) {
            Request& request = at(slots[i]);
            if (request.space.get() != space) {
                space = request.space.get();
                read = {};
                read = std::shared_lock(request.space->mutex);
            }
            const auto turn = turn_of(request);
            const int most = std::min(max_nodes[i], static_cast<std::int32_t>(drafts[i].token_ids.size()));
            const TokenText* shared = &request.space->text;
            if (shared->size() == 0) shared = nullptr;
            Draft& draft = drafts[i];
            const bool is_papers = settings_.paper && !by_votes;
            if (is_papers) {
                propose_as_paper(request, most, draft);
            } else {
                proposer.propose({request.text.get(), request.prompt_end, shared}, shape, most,
                                 settings_.min_token_prob, draft);
            }
            if (!with_evidence) continue;
            draft.evidence = {};
            if (shape != DraftShape::kChain || draft.num_nodes == 0) continue;
            if (!is_papers) {
                proposer.compare_with_source(draft.evidence);
                proposer.tell_others(draft.evidence);
            }
            look_up_tokens(*request.text,
                           draft.token_ids.first(static_cast<std::size_t>(draft.num_nodes)),
                           draft.evidence);
        }
    }

    // Forgets a request. keeps: its output (the given one, else what was committed) is shared.
    void finish(Slot slot, bool keeps, std::optional<std::span<const Token>> output) {
        if (output) require_tokens(*output);
        const bool is_in_background = settings_.indexes_in_background;
        if (is_in_background) start_worker();
        // What may fail comes before the request leaves the table.
        std::list<Task> task;
        auto& finished = std::get<Finished>(task.emplace_back(Finished{}));
        std::shared_ptr<Request> request;  // outlives its turn
        {
            const std::lock_guard lock(requests_mutex_);
            at(slot);
            request = requests_[place_of(slot)];
            finished.space = request->space;
            if (keeps) {
                finished.num_flushes_seen = shared_.num_flushes(*request->space);
                finished.output = output_of(*request, output);
                if (!is_in_background) share(finished);
            }
            const auto turn = turn_of(*request);
            finished.text = std::move(request->text);
            finished.prompt_end = request->prompt_end;
            requests_[place_of(slot)] = nullptr;
            free_slots_.push_back(next_use(slot));
        }
        if (!is_in_background) {
            keep_session(finished);
        } else if (keeps || finished.text->size() > kInlineTokens) {
            num_waiting_tokens_ += finished.output.size();
            add_task(std::move(task));
        }
    }

    void flush(const std::string& space) {
        shared_.flush(space);
        drop_flushed_sessions();
    }
    void resize(std::size_t shared_tokens, std::size_t namespace_tokens) {
        shared_.resize(shared_tokens, namespace_tokens);
    }
    void flush_all() {
        shared_.flush_all();
        drop_flushed_sessions();
    }

    // Waits until all that was handed in is indexed.
    void drain() {
        std::unique_lock lock(tasks_mutex_);
        tasks_changed_.wait(lock, [this] { return tasks_.empty() && !is_working_; });
    }

    struct Stats {
        std::size_t num_requests, num_request_tokens, num_shared_requests, num_shared_tokens,
            num_namespaces, num_sessions, num_session_tokens, num_pending_tokens, num_bytes;
    };
    Stats stats() const {
        const auto shared = shared_.sizes();
        const auto sessions = sessions_.sizes();
        Stats stats{0, 0, shared.num_requests, shared.num_tokens, shared.num_namespaces,
                    sessions.num_texts, sessions.num_tokens, num_waiting_tokens_,
                    pool_.num_bytes() + shared.num_table_bytes + sessions.num_table_bytes};
        const std::shared_lock lock(requests_mutex_);
        for (const auto& request : requests_) {
            if (!request) continue;
            const auto turn = turn_of(*request);
            ++stats.num_requests;
            stats.num_request_tokens += request->text->size();
            stats.num_pending_tokens += request->text->end() - request->text->indexed();
            stats.num_bytes += request->text->num_table_bytes();
        }
        return stats;
    }

    // What is broken in the structures, or null.
    const char* check() const {
        if (const char* broken = shared_.check()) return broken;
        if (const char* broken = sessions_.check()) return broken;
        const std::shared_lock lock(requests_mutex_);
        std::size_t num_active = 0;
        for (const auto& request : requests_) {
            if (!request) continue;
            ++num_active;
            const auto turn = turn_of(*request);
            if (const char* broken = request->text->check()) return broken;
            if (request->prompt_end > request->text->end()) return "a prompt is longer than its text";
        }
        if (num_active + free_slots_.size() != requests_.size()) return "a slot is lost";
        return nullptr;
    }

private:
    static constexpr std::size_t kInlineTokens = 512;

    struct Request {
        explicit Request(std::shared_ptr<Namespace> space) : space(std::move(space)) {}

        std::atomic<int> num_waiting = 0;  // for a turn, which the indexing thread lets pass
        std::mutex mutex;  // guards text; taken after the namespace's
        std::unique_ptr<TokenText> text;  // null when it is finished
        Slot slot = 0;
        std::shared_ptr<Namespace> space;
        Position prompt_end = 0;
    };
    static constexpr std::uint64_t kDrops = ~std::uint64_t{0};
    struct Finished {
        std::shared_ptr<Namespace> space;
        std::uint64_t num_flushes_seen = kDrops;  // kDrops: nothing of it is kept
        std::vector<Token> output;
        std::unique_ptr<TokenText> text;  // freed where the memory of many blocks goes back
        Position prompt_end = 0;
    };
    using Task = std::variant<std::shared_ptr<Request>, Finished>;

    // A text of this prompt: that of the turn before, if it is kept, and what is new.
    std::unique_ptr<TokenText> text_with(const Namespace& space, std::span<const Token> prompt) {
        auto text = sessions_.take(space, shared_.num_flushes(space), prompt);
        if (!text) text = std::make_unique<TokenText>(pool_);
        text->append(prompt.subspan(text->size()));
        return text;
    }

    void drop_flushed_sessions() {
        sessions_.drop_if([this](const Namespace& space, std::uint64_t num_flushes) {
            return shared_.num_flushes(space) != num_flushes;
        });
    }

    // What a finished request leaves to others, and to the next turn of its session. A flush in the
    // meantime must not be outlived.
    void share(const Finished& finished) {
        if (finished.num_flushes_seen == kDrops) return;
        shared_.keep(finished.space, finished.output, finished.num_flushes_seen);
    }
    void keep_session(Finished& finished) {
        if (finished.num_flushes_seen == kDrops) return;
        if (shared_.num_flushes(*finished.space) != finished.num_flushes_seen) return;
        try {
            sessions_.keep(finished.space, finished.num_flushes_seen, std::move(finished.text),
                           finished.prompt_end);
        } catch (const std::bad_alloc&) {
            // The request is finished all the same; the next turn has to index its prompt again.
        }
    }

    static void require_tokens(std::span<const Token> tokens) {
        Token least = 0;
        for (const Token token : tokens) least = std::min(least, token);
        if (least < 0) {
            throw std::invalid_argument("token ids must not be negative, got " +
                                        std::to_string(least));
        }
        if (tokens.size() > std::size_t{1} << 30) {
            throw std::invalid_argument("at most 2**30 tokens at once");
        }
    }

    // A slot is a place in the table, and above it how often the place was used before: who holds
    // the slot of a finished request does not come upon the next one there.
    static constexpr int kPlaceBits = 20;
    static constexpr std::size_t kMaxRequests = std::size_t{1} << kPlaceBits;
    static std::size_t place_of(Slot slot) { return static_cast<std::size_t>(slot) % kMaxRequests; }
    static Slot next_use(Slot slot) {
        const auto next = static_cast<std::uint32_t>(slot) + kMaxRequests;
        return static_cast<Slot>(next & 0x7FFFFFFFu);
    }

    Request& at(Slot slot) const {
        const std::size_t place = place_of(slot);
        if (slot < 0 || place >= requests_.size() || !requests_[place] ||
            requests_[place]->slot != slot) {
            throw std::invalid_argument("slot " + std::to_string(slot) + " holds no active request");
        }
        return *requests_[place];
    }

    static std::unique_lock<std::mutex> turn_of(Request& request) {
        std::unique_lock turn(request.mutex, std::try_to_lock);
        if (!turn) {
            ++request.num_waiting;
            turn.lock();
            --request.num_waiting;
        }
        return turn;
    }

    void propose_as_paper(const Request& request, int most, Draft& draft) const {
        draft.num_nodes = 0;
        draft.match = {};
        thread_local PaperProposer reused;
        PaperProposer& proposer = reused;
        const PaperSettings& settings = *settings_.paper;
        const auto context = PaperProposer::context_of(settings, *request.text);
        const auto own = proposer.propose(settings, *request.text, context, most);
        const auto shared = proposer.propose(settings, request.space->text, context, most);
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

    static std::vector<Token> output_of(Request& request,
                                        std::optional<std::span<const Token>> given) {
        if (given) return {given->begin(), given->end()};
        const auto turn = turn_of(request);
        std::vector<Token> output(request.text->end() - request.prompt_end);
        request.text->copy(request.prompt_end, output);
        return output;
    }

    // ---- the thread that indexes ----

    // Not before it is needed: a process may be forked until then.
    void start_worker() {
        const std::lock_guard lock(tasks_mutex_);
        if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
    }

    // Takes no memory.
    void add_task(std::list<Task> task) {
        {
            const std::lock_guard lock(tasks_mutex_);
            tasks_.splice(tasks_.end(), task);
        }
        tasks_changed_.notify_all();
    }

    void work() {
        std::unique_lock lock(tasks_mutex_);
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
                auto& finished = std::get<Finished>(task.front());
                share(finished);
                keep_session(finished);
                num_waiting_tokens_ -= finished.output.size();
            }
            if (is_done) task.clear();
            lock.lock();
            tasks_.splice(tasks_.end(), task);  // what is not done; others have their turn
            is_working_ = false;
            if (tasks_.empty()) tasks_changed_.notify_all();
        }
    }

    // Returns whether nothing is left to do.
    bool index_some(Request& request) {
        constexpr int kPiecesPerTurn = 64;
        for (int piece = 0; piece < kPiecesPerTurn; ++piece) {
            // The mutex alone would come back to this thread before who waits for it wakes up.
            while (request.num_waiting.load(std::memory_order_relaxed) > 0) {
                std::this_thread::yield();
            }
            const std::lock_guard turn(request.mutex);
            if (!request.text) return true;  // it is finished
            TokenText& text = *request.text;
            if (text.indexed() == 0) text.reserve(text.size());
            text.index(kPieceTokens);
            if (!text.has_backlog()) return true;
        }
        return false;
    }

    CacheSettings settings_;
    BlockPool pool_;
    SharedTexts shared_;
    SessionTexts sessions_;

    mutable std::shared_mutex requests_mutex_;  // taken first
    std::vector<std::shared_ptr<Request>> requests_;
    std::vector<Slot> free_slots_;

    std::mutex tasks_mutex_;
    std::condition_variable tasks_changed_;
    std::list<Task> tasks_;
    std::atomic<std::size_t> num_waiting_tokens_ = 0;  // of outputs among the tasks
    bool is_working_ = false, is_stopping_ = false;
    std::thread worker_;
};

}  // namespace sglang_hvd
