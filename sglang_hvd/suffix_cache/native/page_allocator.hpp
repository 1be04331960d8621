// Memory of large arrays. It goes back to the operating system when they are freed.
#pragma once

#include <cstddef>
#include <new>

#include <sys/mman.h>

namespace sglang_hvd {

// An array of kMinPaged bytes or more has pages of its own. glibc starts with such a limit too, but each
// large array that is freed raises it, up to 32 MB, and smaller arrays stay in the heap's arenas.
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
    static constexpr std::size_t kMinPaged = 128 * 1024;

    static bool has_pages([[maybe_unused]] std::size_t num) {
#ifdef HVD_CHECKED
        return false;  // AddressSanitizer sees only arrays of the heap
#else
        return num >= kMinPaged / sizeof(T);
#endif
    }
};

}  // namespace sglang_hvd
