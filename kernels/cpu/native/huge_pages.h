// Large zeroed allocations in huge pages: weights and keys are streamed, and page walks would cost 5-15 %.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include <sys/mman.h>

namespace llmbox {

// Gives memory its pages before it is used; content stays. False if the system cannot (Linux before 5.14).
inline bool populate([[maybe_unused]] uint8_t* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
    constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE, which older headers lack
    constexpr uintptr_t PAGE = 4096;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / PAGE * PAGE;
    return madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, POPULATE_WRITE) == 0;
#else
    return false;
#endif
}

#ifdef __SANITIZE_ADDRESS__

// Exactly as large as asked, so that the sanitizer sees every step beyond.
class HugeBlock {
public:
    explicit HugeBlock(size_t bytes, uint8_t* outside = nullptr) : memory_(outside ? 0 : bytes), outside_(outside) {}
    uint8_t* data() const { return outside_ ? outside_ : const_cast<uint8_t*>(memory_.data()); }

private:
    std::vector<uint8_t> memory_;
    uint8_t* outside_;
};

#else

class HugeBlock {
public:
    // With `outside` the memory belongs to the caller, is filled and may be read-only.
    explicit HugeBlock(size_t bytes, uint8_t* outside = nullptr) : data_(outside) {
        if (outside) return;
        // Small ones stay in small pages: a model has hundreds of them.
        alignment_ = bytes >= kHuge ? kHuge : 4096;
        mapped_ = (bytes + 2 * alignment_ - 1) / alignment_ * alignment_;
        base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        uintptr_t start = (reinterpret_cast<uintptr_t>(base_) + alignment_ - 1) / alignment_ * alignment_;
        data_ = reinterpret_cast<uint8_t*>(start);
#ifdef MADV_HUGEPAGE
        if (alignment_ == kHuge) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
    }
    ~HugeBlock() {
        if (base_) munmap(base_, mapped_);
    }
    HugeBlock(const HugeBlock&) = delete;
    HugeBlock& operator=(const HugeBlock&) = delete;

    uint8_t* data() const { return data_; }

private:
    static constexpr size_t kHuge = size_t{2} << 20;
    size_t alignment_, mapped_;
    void* base_ = nullptr;
    uint8_t* data_;
};

#endif

}  // namespace llmbox
