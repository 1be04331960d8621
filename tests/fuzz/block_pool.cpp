// Releases blocks and allocates them again, with pages smaller and larger than a block. Blocks in use must
// keep what was written into them. Usage: block_pool
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "block_pool.hpp"

int main() {
    using sglang_hvd::BlockPool;
    for (const std::size_t page_bytes : {4096, 16384, 65536}) {
        BlockPool pool(page_bytes);
        std::mt19937 random(1);
        std::vector<std::uint32_t*> used;
        std::vector<std::uint32_t> written;
        std::size_t most = 0;
        for (std::uint32_t step = 0; step < 20'000; ++step) {
            // Grows to hundreds of blocks and shrinks again.
            const bool takes = used.empty() || random() % 1000 < (step / 2000 % 2 ? 350 : 650);
            if (takes) {
                auto* block = static_cast<std::uint32_t*>(pool.allocate());
                for (std::size_t i = 0; i < BlockPool::kBlockBytes / 4; i += 512) block[i] = step;
                used.push_back(block);
                written.push_back(step);
                most = std::max(most, used.size());
                continue;
            }
            const std::size_t which = random() % used.size();
            for (std::size_t i = 0; i < BlockPool::kBlockBytes / 4; i += 512) {
                if (used[which][i] == written[which]) continue;
                std::fprintf(stderr, "a block was wiped, pages of %zu\n", page_bytes);
                return 1;
            }
            pool.release(used[which]);
            used[which] = used.back();
            written[which] = written.back();
            used.pop_back();
            written.pop_back();
        }
        while (!used.empty()) {
            pool.release(used.back());
            used.pop_back();
        }
        // All but a few blocks go back; none does if pages are larger than blocks.
        const std::size_t kept = pool.num_bytes() / BlockPool::kBlockBytes;
        if (kept != (page_bytes > BlockPool::kBlockBytes ? most : std::min<std::size_t>(most, 64))) {
            std::fprintf(stderr, "%zu of %zu blocks kept, pages of %zu\n", kept, most, page_bytes);
            return 1;
        }
    }
    std::puts("blocks: sound");
}
