#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

namespace dadt {

// One direction between two ranks: a ring of bytes in shared memory that frames go through whole. One writer,
// one reader. Zeros are an empty one.
class ByteRing {
 public:
  static size_t memory_bytes(size_t capacity) { return sizeof(Head) + capacity; }

  ByteRing(void* memory, size_t capacity)
      : head_(static_cast<Head*>(memory)),
        bytes_(static_cast<uint8_t*>(memory) + sizeof(Head)),
        capacity_(capacity) {}

  size_t unread() const { return head_->written.load() - head_->read.load(); }
  bool has_room(size_t bytes) const { return capacity_ - unread() >= bytes; }

  // Writer: bytes behind those written before; the reader sees them at `publish`. Needs room.
  void put(const void* data, size_t bytes) {
    each_part(head_->written.load() + ahead_, bytes, [&](uint8_t* at, size_t from, size_t count) {
      std::memcpy(at, static_cast<const uint8_t*>(data) + from, count);
    });
    ahead_ += bytes;
  }
  void publish() {
    head_->written.fetch_add(ahead_);
    ahead_ = 0;
  }
  // Writer: have the reader tell when there is more room. Look for room once more after it.
  void want_room() { head_->wanted.store(1); }

  // Reader: copies bytes that lie `offset` behind the first unread one.
  void peek(void* to, size_t offset, size_t bytes) const {
    each_part(head_->read.load() + offset, bytes, [&](const uint8_t* at, size_t from, size_t count) {
      std::memcpy(static_cast<uint8_t*>(to) + from, at, count);
    });
  }
  // Reader: forgets the first unread bytes; true if the writer is to be woken.
  bool pop(size_t bytes) {
    head_->read.fetch_add(bytes);
    return head_->wanted.load() != 0 && head_->wanted.exchange(0) != 0;
  }

 private:
  struct Head {
    alignas(64) std::atomic<uint64_t> written;  // bytes since the beginning
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::atomic<uint32_t> wanted;
  };

  // Calls part(address, offset, count) for each contiguous part of a range.
  template <typename Part>
  void each_part(uint64_t position, size_t bytes, Part&& part) const {
    const size_t at = position % capacity_;
    const size_t first = bytes < capacity_ - at ? bytes : capacity_ - at;
    if (first > 0) part(bytes_ + at, 0, first);
    if (bytes > first) part(bytes_, first, bytes - first);
  }

  // Constant after construction.
  Head* head_;
  uint8_t* bytes_;
  size_t capacity_;

  // Writer.
  size_t ahead_ = 0;  // put and not published
};

// Memory of this process for a ring.
class RingMemory {
 public:
  explicit RingMemory(size_t capacity)
      : capacity_(capacity),
        blocks_(new Block[(ByteRing::memory_bytes(capacity) + sizeof(Block) - 1) / sizeof(Block)]{}) {}

  ByteRing ring() const { return ByteRing(blocks_.get(), capacity_); }

 private:
  struct alignas(64) Block {
    uint8_t bytes[64];
  };

  size_t capacity_;
  std::unique_ptr<Block[]> blocks_;
};

}  // namespace dadt
