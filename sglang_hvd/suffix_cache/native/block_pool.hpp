// Fixed-size blocks of memory. Blocks that are no longer needed go back to the operating system.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <new>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

namespace sglang_hvd {

// Hands out blocks of kBlockBytes. A few freed blocks are kept for reuse. The memory of all others is
// given back at once (MADV_DONTNEED), and their addresses are used again later. If a page holds several
// blocks (64 KB pages, on some ARM systems), all are kept: giving one back would take its neighbours.
//
// Thread-safe: the calling thread and the indexing thread both allocate and release without the cache's
// mutex. With HVD_CHECKED every block is its own allocation, so that AddressSanitizer sees each use of a
// freed block.
class BlockPool {
public:
    static constexpr std::size_t kBlockBytes = 16 * 1024;  // a multiple of pages of 4 and 16 KB

    explicit BlockPool(std::size_t page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE)))
        : max_warm_(kBlockBytes % page_bytes == 0 ? kMaxWarm
                                                  : std::numeric_limits<std::size_t>::max()) {}
    BlockPool(const BlockPool&) = delete;
    BlockPool& operator=(const BlockPool&) = delete;
    ~BlockPool() {
        for (void* slab : slabs_) munmap(slab, kSlabBlocks * kBlockBytes);
    }

    // Returns a block with undefined contents.
    void* allocate() {
        const std::lock_guard lock(mutex_);
#ifdef HVD_CHECKED
        void* block = ::operator new(kBlockBytes);
#else
        if (warm_.empty() && cold_.empty()) add_slab();
        auto& from = warm_.empty() ? cold_ : warm_;
        void* block = from.back();
        from.pop_back();
#endif
        ++num_used_;
        return block;
    }

    void release(void* block) {
        const std::lock_guard lock(mutex_);
        --num_used_;
#ifdef HVD_CHECKED
        ::operator delete(block);
#else
        if (warm_.size() < max_warm_) {
            warm_.push_back(block);
        } else {
            madvise(block, kBlockBytes, MADV_DONTNEED);
            cold_.push_back(block);
        }
#endif
    }

    // Memory of the blocks in use and of those kept for reuse, in bytes.
    std::size_t num_bytes() const {
        const std::lock_guard lock(mutex_);
        return (num_used_ + warm_.size()) * kBlockBytes;
    }

private:
    static constexpr std::size_t kSlabBlocks = 256;
    static constexpr std::size_t kMaxWarm = 64;

    void add_slab() {
        const std::size_t num_slabs = slabs_.size() + 1;
        slabs_.reserve(num_slabs);
        cold_.reserve(num_slabs * kSlabBlocks);  // release() must not throw
        warm_.reserve(std::min(max_warm_, num_slabs * kSlabBlocks));
        void* slab = mmap(nullptr, kSlabBlocks * kBlockBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (slab == MAP_FAILED) throw std::bad_alloc();
        slabs_.push_back(slab);
        for (std::size_t i = kSlabBlocks; i-- > 0;) {
            cold_.push_back(static_cast<std::byte*>(slab) + i * kBlockBytes);
        }
    }

    const std::size_t max_warm_;  // how many freed blocks are kept
    mutable std::mutex mutex_;
    std::vector<void*> slabs_, warm_, cold_;
    std::size_t num_used_ = 0;
};

}  // namespace sglang_hvd
