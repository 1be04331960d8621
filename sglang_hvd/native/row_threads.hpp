// Threads that share the rows of a step with the thread that calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace sglang_hvd {

// The calling thread begins at once, and the others join it once the system has woken them. So few rows do not wait
// for a thread.
class RowThreads {
public:
    // What a thread does with the rows [first, last). Two calls that run at the same time have different threads,
    // numbered from 0.
    using Work = std::function<void(std::size_t thread, std::size_t first, std::size_t last)>;

    // num_threads: the calling one included.
    explicit RowThreads(std::size_t num_threads) : num_threads_(num_threads) {
        if (num_threads == 0) throw std::invalid_argument("there is at least the calling thread");
    }
    RowThreads(const RowThreads&) = delete;
    RowThreads& operator=(const RowThreads&) = delete;
    ~RowThreads() {
        {
            const std::lock_guard lock(mutex_);
            is_stopping_ = true;
        }
        changed_.notify_all();
        for (std::thread& helper : helpers_) helper.join();
    }

    std::size_t size() const { return num_threads_; }

    // Does the work for all rows, and returns when all threads have left it. Rethrows what the work throws; some
    // rows are not done then.
    void run(std::size_t num_rows, const Work& work) {
        if (num_threads_ == 1 || num_rows < kFewestRows) {
            work(0, 0, num_rows);
            return;
        }
        start_helpers();
        {
            const std::lock_guard lock(mutex_);
            work_ = &work;
            num_rows_ = num_rows;
            next_row_.store(0, std::memory_order_relaxed);
            failure_ = nullptr;
            ++number_;
        }
        changed_.notify_all();
        take_rows(0);
        for (int turn = 0; turn < kTurns && num_inside_.load(std::memory_order_acquire) > 0; ++turn)
            std::this_thread::yield();
        std::unique_lock lock(mutex_);
        left_.wait(lock, [this] { return num_inside_.load(std::memory_order_relaxed) == 0; });
        work_ = nullptr;  // a thread that wakes only now finds nothing
        if (failure_) std::rethrow_exception(failure_);
    }

private:
    // A request takes about 5 us in a step, and waking a thread some tens. In a server on two cores, threads do not
    // shorten steps of 16 or 32 requests.
#ifdef HVD_CHECKED
    static constexpr std::size_t kFewestRows = 2, kRowsAtOnce = 1;  // so that small tests share their rows
#else
    static constexpr std::size_t kFewestRows = 64, kRowsAtOnce = 4;
#endif
    // Turns that the calling thread waits for the others before it sleeps. They have four rows each to finish.
    static constexpr int kTurns = 200;

    // Not before they are needed: until then the process may be forked.
    void start_helpers() {
        while (helpers_.size() + 1 < num_threads_) {
            const std::size_t thread = helpers_.size() + 1;
            helpers_.emplace_back([this, thread] { help(thread); });
        }
    }

    void help(std::size_t thread) {
        std::uint64_t seen = 0;
        std::unique_lock lock(mutex_);
        while (true) {
            changed_.wait(lock, [&] { return is_stopping_ || (work_ != nullptr && number_ != seen); });
            if (is_stopping_) return;
            seen = number_;
            num_inside_.fetch_add(1, std::memory_order_relaxed);
            lock.unlock();
            take_rows(thread);
            lock.lock();
            num_inside_.fetch_sub(1, std::memory_order_release);
            left_.notify_one();
        }
    }

    void take_rows(std::size_t thread) {
        try {
            while (true) {
                const std::size_t first = next_row_.fetch_add(kRowsAtOnce, std::memory_order_relaxed);
                if (first >= num_rows_) return;
                (*work_)(thread, first, std::min(first + kRowsAtOnce, num_rows_));
            }
        } catch (...) {
            next_row_.store(num_rows_, std::memory_order_relaxed);
            const std::lock_guard lock(mutex_);
            failure_ = std::current_exception();
        }
    }

    const std::size_t num_threads_;
    std::mutex mutex_;
    std::condition_variable changed_, left_;
    // Written under the mutex while no thread is inside; read by the threads inside.
    const Work* work_ = nullptr;
    std::size_t num_rows_ = 0;
    std::uint64_t number_ = 0;  // of the work
    std::atomic<std::size_t> next_row_ = 0;
    // Written under the mutex.
    std::atomic<std::size_t> num_inside_ = 0;
    std::exception_ptr failure_;
    bool is_stopping_ = false;
    std::vector<std::thread> helpers_;
};

}  // namespace sglang_hvd
