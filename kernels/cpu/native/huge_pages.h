// Large zeroed allocations in huge pages: weights and keys are streamed, and page walks would cost 5-15 %.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
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

// Address space in huge pages, of which blocks are cut one after the other, since most weights of a model are smaller than a huge
// page or end inside one. A block that is freed gives its memory back, but its place is not used again.
class HugeRegion {
public:
    static constexpr size_t HUGE_PAGE = size_t{2} << 20, SMALL_PAGE = 4096;

    explicit HugeRegion(size_t bytes) : mapped_(round(bytes, HUGE_PAGE) + HUGE_PAGE) {
        base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        next_ = reinterpret_cast<uint8_t*>(round(reinterpret_cast<uintptr_t>(base_), HUGE_PAGE));
        end_ = next_ + round(bytes, HUGE_PAGE);
#ifdef MADV_HUGEPAGE
        madvise(next_, end_ - next_, MADV_HUGEPAGE);
#endif
    }
    ~HugeRegion() { munmap(base_, mapped_); }
    HugeRegion(const HugeRegion&) = delete;
    HugeRegion& operator=(const HugeRegion&) = delete;

    // Zeros. Null if there is no room.
    uint8_t* cut(size_t bytes) {
        bytes = round(bytes, SMALL_PAGE);
        if (bytes > static_cast<size_t>(end_ - next_)) return nullptr;
        next_ += bytes;
        return next_ - bytes;
    }

    static size_t round(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

private:
    size_t mapped_;
    void* base_;
    uint8_t *next_, *end_;
};

class HugeBlock {
public:
    // With `outside` the memory belongs to the caller, is filled and may be read-only.
    explicit HugeBlock(size_t bytes, uint8_t* outside = nullptr) : bytes_(bytes), data_(outside) {
        if (outside) return;
        if (bytes >= LARGE) region_ = std::make_shared<HugeRegion>(bytes);
        else {
            static std::mutex mutex;
            static std::shared_ptr<HugeRegion>& shared = *new std::shared_ptr<HugeRegion>;
            const std::lock_guard lock(mutex);
            if (shared) data_ = shared->cut(bytes);
            if (!data_) shared = std::make_shared<HugeRegion>(REGION);
            region_ = shared;
        }
        if (!data_) data_ = region_->cut(bytes);
    }
    ~HugeBlock() {
        if (region_) madvise(data_, HugeRegion::round(bytes_, HugeRegion::SMALL_PAGE), MADV_DONTNEED);
    }
    HugeBlock(const HugeBlock&) = delete;
    HugeBlock& operator=(const HugeBlock&) = delete;

    uint8_t* data() const { return data_; }

private:
    static constexpr size_t REGION = size_t{64} << 20, LARGE = size_t{16} << 20;

    size_t bytes_;
    uint8_t* data_;
    std::shared_ptr<HugeRegion> region_;
};

#endif

}  // namespace llmbox
