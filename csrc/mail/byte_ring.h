#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

namespace dadt {

// A ring buffer of bytes in shared memory, for one direction between two ranks. There is one writer and one
// reader, and a frame is written only if there is room for all of it. A ring in zeroed memory is empty.
class ByteRing {
 public:
  static size_t memory_bytes(size_t capacity) { return sizeof(Head) + capacity; }

  ByteRing(void* memory, size_t capacity)
      : head_(static_cast<Head*>(memory)),
        bytes_(static_cast<uint8_t*>(memory) + sizeof(Head)),
        capacity_(capacity) {}

  size_t unread() const { return head_->written.load() - head_->read.load(); }
  bool has_room(size_t bytes) const { return capacity_ - unread() >= bytes; }

  // Called by the writer: appends bytes, which the reader sees after `publish`. There must be room for them.
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
  // Called by the writer: asks the reader to report when there is more room. The writer must then check for
  // room once more, since the reader may have made room before this call.
  void want_room() { head_->wanted.store(1); }

  // Called by the reader: copies bytes that begin `offset` bytes after the first unread one.
  void peek(void* to, size_t offset, size_t bytes) const {
    each_part(head_->read.load() + offset, bytes, [&](const uint8_t* at, size_t from, size_t count) {
      std::memcpy(static_cast<uint8_t*>(to) + from, at, count);
    });
  }
  // Called by the reader: calls part(address, count) for each contiguous part of the first unread bytes.
  template <typename Part>
  void visit(size_t bytes, Part&& part) const {
    each_part(head_->read.load(), bytes, [&](const uint8_t* at, size_t, size_t count) { part(at, count); });
  }
  // Called by the reader: removes the first unread bytes. Returns whether the writer must be woken.
  bool pop(size_t bytes) {
    head_->read.fetch_add(bytes);
    return head_->wanted.load() != 0 && head_->wanted.exchange(0) != 0;
  }

 private:
  struct Head {
    alignas(64) std::atomic<uint64_t> written;  // total bytes written to the ring
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) std::atomic<uint32_t> wanted;
  };

  // Calls part(address, offset, count) for each contiguous part of a range of bytes.
  template <typename Part>
  void each_part(uint64_t position, size_t bytes, Part&& part) const {
    const size_t at = position % capacity_;
    const size_t first = bytes < capacity_ - at ? bytes : capacity_ - at;
    if (first > 0) part(bytes_ + at, 0, first);
    if (bytes > first) part(bytes_, first, bytes - first);
  }

  // The following fields are constant after construction.
  Head* head_;
  uint8_t* bytes_;
  size_t capacity_;

  // Only the writer uses the following field.
  size_t ahead_ = 0;  // bytes written by `put` that are not published yet
};

// Memory for a ring within this process.
class RingMemory {
 public:
  explicit RingMemory(size_t capacity)
      : capacity_(capacity),
        blocks_(new Block[(ByteRing::memory_bytes(capacity) + sizeof(Block) - 1) / sizeof(Block)]) {
    // Only an empty ring's head must be zeroed: memory that is never written to costs nothing.
    std::memset(blocks_.get(), 0, ByteRing::memory_bytes(0));
  }

  ByteRing ring() const { return ByteRing(blocks_.get(), capacity_); }

 private:
  struct alignas(64) Block {
    uint8_t bytes[64];
  };

  size_t capacity_;
  std::unique_ptr<Block[]> blocks_;
};

}  // namespace dadt
