// Memory of large arrays that goes back to the operating system when they are freed.
#pragma once

#include <cstddef>
#include <new>

#include <sys/mman.h>

namespace sglang_hvd {

// From kMostOfHeap bytes on an array has pages of its own. glibc begins like that too, but every large
// array that is freed raises its limit, up to 32 MB; what lies below stays in the heap's arenas.
template <typename T>
class PageAllocator {
public:
    using value_type = T;

    PageAllocator() = default;
    template <typename U>
    PageAllocator(const PageAllocator<U>&) {}

    T* allocate(std::size_t num) {
        if (!has_pages(num)) return static_cast<T*>(::operator new(num * sizeof(T), kAlign));
        void* pages = mmap(nullptr, num * sizeof(T), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED) throw std::bad_alloc();
        return static_cast<T*>(pages);
    }

    void deallocate(T* array, std::size_t num) {
        if (has_pages(num)) {
            munmap(array, num * sizeof(T));
        } else {
            ::operator delete(array, kAlign);
        }
    }

    bool operator==(const PageAllocator&) const { return true; }

private:
    static constexpr std::align_val_t kAlign{alignof(T)};
    static constexpr std::size_t kMostOfHeap = 128 * 1024;

    static bool has_pages(std::size_t num) {
#ifdef HVD_CHECKED
        return false;  // AddressSanitizer sees the heap's arrays only
#else
        return num >= kMostOfHeap / sizeof(T);
#endif
    }
};

}  // namespace sglang_hvd
