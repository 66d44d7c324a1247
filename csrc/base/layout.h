#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/dtype.h"

namespace dadt {

// The tensors that make up one bucket: their element counts in order, and their common dtype. Immutable.
class Layout {
 public:
  Layout() : Layout(DType::kUInt8, {}) {}

  Layout(DType dtype, std::vector<size_t> counts)
      : dtype_(dtype), counts_(std::move(counts)), ends_(counts_) {
    for (size_t i = 1; i < ends_.size(); ++i) ends_[i] += ends_[i - 1];
    // FNV-1a hash over counts instead of bytes
    for (size_t count : counts_) hash_ = (hash_ ^ count) * 0x100000001b3ull;
  }

  DType dtype() const { return dtype_; }
  const std::vector<size_t>& counts() const { return counts_; }
  size_t total() const { return ends_.empty() ? 0 : ends_.back(); }
  size_t bytes() const { return total() * item_size(dtype_); }
  uint64_t hash() const { return hash_; }

  // Calls piece(index of the tensor, offset in the tensor, offset in the range, count) for each tensor that
  // overlaps elements [begin, end) of the bucket. Offsets and count are in elements.
  template <typename Piece>
  void pieces(size_t begin, size_t end, Piece&& piece) const {
    size_t tensor = std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin();
    for (size_t at = begin; at < end; ++tensor) {
      const size_t first = ends_[tensor] - counts_[tensor];
      const size_t count = std::min(end, ends_[tensor]) - at;
      if (count > 0) piece(tensor, at - first, at - begin, count);
      at += count;
    }
  }

 private:
  // The following fields are constant after construction.
  DType dtype_;
  std::vector<size_t> counts_;
  std::vector<size_t> ends_;  // ends_[i] is the number of elements in tensors 0 to i
  uint64_t hash_ = 0xcbf29ce484222325ull;
};

}  // namespace dadt
